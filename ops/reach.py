"""How commands reach tasks: one store, one set of views, ids from beginnings of ids."""

from __future__ import annotations

from dataclasses import dataclass

from enqueue.ids import checked_id
from worker.dispatch import open_store
from worker.settings import Settings, load_settings
from worker.state.store import Store
from worker.state.views import Views


@dataclass(frozen=True)
class Reach:
    """Everything a command needs of one Redis. Opens no connection by itself."""

    settings: Settings
    store: Store
    views: Views

    def find(self, prefix: str) -> str:
        """The task id that `prefix` is, or is the beginning of. Raises InvalidInput, TaskNotFound."""
        return self.views.resolve(checked_id(prefix))


def reach() -> Reach:
    """As the settings say."""
    settings = load_settings()
    store = open_store(settings)
    return Reach(settings, store, Views(store.client, store.keys, store.clock))
