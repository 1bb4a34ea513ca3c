"""`baton drill`: a deliberate kill exercise that ends with a verdict. `ops.drill.command` is the way in."""
