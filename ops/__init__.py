"""The operator side: the `baton` command, the local stack, the demo, the scripted model."""
