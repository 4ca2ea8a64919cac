"""A notifier for the tests: it appends what it is told to the file that ``HSX_TEST_ALERTS`` names."""

from __future__ import annotations

import json
import os
from typing import Any

from airflow.sdk import BaseNotifier


class FileNotifier(BaseNotifier):
    """One JSON line an alert."""

    template_fields = ("subject", "text")

    def __init__(self, subject: str, text: str = "{{ alert_text }}") -> None:
        super().__init__()
        self.subject, self.text = subject, text

    def notify(self, context: Any) -> None:
        """Append it."""
        with open(os.environ["HSX_TEST_ALERTS"], "a") as f:
            f.write(json.dumps([self.subject, self.text]) + "\n")
