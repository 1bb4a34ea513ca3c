"""`baton api`: what the API has told the fleet, and taking it back."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.support.commands import Done, baton, ours
from worker.state.task import ParkNote, Status
from worker.state.throttle import Endpoint, Told
from worker.throttle import throttle_of
