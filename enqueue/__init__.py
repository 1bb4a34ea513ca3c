"""The client side: enqueue tasks, follow them, steer them.

    from enqueue import enqueue_task, get_task

    task = enqueue_task("turn these sales notes into a report")
    task.wait(timeout_s=600)
    print(task.result)

Importing this package costs nothing; Redis, RQ and pydantic are imported with the first name that is used. Never
imports anthropic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enqueue.api import TaskHandle, enqueue_task, get_task
    from enqueue.many import enqueue_many

__all__ = ["TaskHandle", "enqueue_many", "enqueue_task", "get_task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from enqueue import api, many

    return getattr(many if name == "enqueue_many" else api, name)
