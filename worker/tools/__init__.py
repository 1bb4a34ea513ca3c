"""Tools: what the model may do, how each call may be repeated, and what it is told about it.

For authors: `tool`, `ToolContext`, `ToolFailure`, `Verdict`. For the agent: the rest.
"""

from worker.errors import ToolFailure
from worker.tools.base import Tool, tool
from worker.tools.context import ToolContext, ToolDefinitionError, ToolResult, Verdict
from worker.tools.effects import Effect
from worker.tools.toolbox import Toolbox, load_toolbox

__all__ = [
    "Effect",
    "Tool",
    "ToolContext",
    "ToolDefinitionError",
    "ToolFailure",
    "ToolResult",
    "Toolbox",
    "Verdict",
    "load_toolbox",
    "tool",
]
