"""The tools every worker has."""

from worker.tools.builtin.files import list_dir, read_file, write_file
from worker.tools.builtin.mail import send_email
from worker.tools.builtin.search import grep
from worker.tools.builtin.web import fetch_url

__all__ = ["fetch_url", "grep", "list_dir", "read_file", "send_email", "write_file"]
