"""What the scripted model says in `baton demo`. Its answers are made of the results it is given."""

from __future__ import annotations

from typing import Any

TASK = "Turn these sales notes into a report."

NOTES = """\
Monday: 3 crates of apples to Hillside School, $412.50
Tuesday: nobody came, it rained
Wednesday: 12 crates of pears to the Corner Market, $1,380.00
Thursday: Hillside School asks for the same again every week
Friday: 1 crate of quinces to Mrs. Abara, $64.00, she wants the recipe
"""

_REPORT = {
    "name": "write_report",
    "input": {
        "title": "Sales report",
        "body": (
            "{% set seen = results.count_words | from_json %}{% set notes = results.read_notes %}"
            "{{ seen.lines }} notes, {{ seen.words }} words; {{ seen.amounts }} sales"
            ", {{ '%.2f' | format(seen.total) }} dollars in all.\\n\\n"
            "{% for line in notes.splitlines() if line.strip() %}- {{ line }}\\n{% endfor %}"
        ).replace("\\n", "\n"),
    },
}
_DONE = {"text": "The report is written: {{ (results.count_words | from_json).total }} dollars of sales."}
_FOUND = {"text": "I checked: the report is there, so I did not write it again."}

SCRIPT: dict[str, Any] = {
    "turns": [
        {"text": "I read the notes first.", "calls": [{"name": "read_notes"}]},
        {"text": "Now I count.", "calls": [{"name": "count_words", "input": {"text": "{{ results.read_notes }}"}}]},
        {"text": "I write the report.", "calls": [_REPORT]},
        {  # after a crash that left the outcome unknown, the model is told so: it looks before it leaps
            "when": "{{ results_all[-1].is_error }}",
            "text": "It may have been written already. I look.",
            "calls": [{"name": "read_report"}],
            "otherwise": _DONE,
        },
        {
            "when": "{{ results_all[-1].is_error }}",
            "text": "It was not written. I write it now.",
            "calls": [_REPORT],
            "otherwise": _FOUND,
        },
        _DONE,
    ]
}
