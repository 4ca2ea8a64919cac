"""Space: is it enough, may old hidden states go, and the deletion itself."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from hsx_host import contract as c
from hsx_operators.alerts import Alarm
from hsx_operators.answers import human_bytes
from hsx_operators.base import HostVerbOperator
from hsx_operators.errors import HostRefused
from hsx_operators.hook import hook_of
from hsx_operators.plan import SKIPPED_BECAUSE

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class DiskSpaceOperator(HostVerbOperator):
    """Needed against free against reclaimable; fails where even a cleanup would not do, or none is allowed.

    A dry run only tells. XCom: the ``DiskVerdict``.
    """

    result_type = c.DiskVerdict

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("on_failure_callback", Alarm("disk_short", only=HostRefused))
        super().__init__(**kwargs)

    def verb(self, context: Context) -> list[str]:
        """``disk``."""
        return ["disk"]

    def result(self, document: c.DiskVerdict, host: dict[str, Any], context: Context) -> Any:
        """Tell the verdict in bytes; raise where the run can't fit."""
        self.log.info("%s", document.text)
        for old in document.old_states:
            self.log.info("old states: %s (%d files) %s", human_bytes(old.bytes), old.files, old.path)
        fits = document.verdict == "fits" or (document.verdict == "cleanup" and host["cleanup_policy"] != "never")
        if not fits and not host["dry_run"]:
            fix = "free space, or choose fewer shards or another output_root"
            if document.verdict == "cleanup":
                fix = "set cleanup_policy to ask or auto, or " + fix
            raise HostRefused("disk", c.ErrorDoc("refused", document.text, "output_root", document.verdict, fix))
        return c.to_dict(document)


def needs_cleanup(disk: dict[str, Any]) -> bool:
    """Whether old states have to go before the new ones fit."""
    return bool(disk["verdict"] == "cleanup")


class ApproveCleanupOperator(ApprovalOperator):
    """Asks a person before old states are deleted, and only then: the policy is ``ask`` and the space is needed.

    It comes before the host is borrowed, so that production never waits for a person. A rejection, or no answer in
    time, skips the rest of the run.

    :param disk: the disk check's verdict.
    :param run: plan's XCom ``run``.
    """

    template_fields = ("subject", "body", "disk", "run")

    def __init__(self, *, disk: Any, run: Any, **kwargs: Any) -> None:
        kwargs.setdefault("subject", "hsx: delete old hidden states?")
        kwargs.setdefault("response_timeout", timedelta(hours=12))
        kwargs.setdefault("defaults", self.REJECT)
        kwargs.setdefault("ignore_downstream_trigger_rules", True)
        super().__init__(**kwargs)
        self.disk, self.run = disk, run

    def execute(self, context: Context) -> Any:
        """Wait for an answer where one is needed."""
        if not needs_cleanup(self.disk) or self.run["cleanup_policy"] != "ask":
            self.log.info("No approval needed: verdict %s, policy %s", self.disk["verdict"], self.run["cleanup_policy"])
            return {"chosen_options": [self.APPROVE]}
        listed = "\n".join(
            f"- `{old['path']}`: {human_bytes(old['bytes'])}, {old['files']} files" for old in self.disk["old_states"]
        )
        self.body = f"{self.disk['text']}\n\nThese folders would be deleted, after the probe has passed:\n\n{listed}"
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """A rejection skips the rest; the verdict is told why."""
        if "error" not in event and event.get("chosen_options") == [self.REJECT]:
            reason = "The cleanup of old states was rejected (or nobody answered in time): nothing was extracted."
            context["ti"].xcom_push(key=SKIPPED_BECAUSE, value=reason)
        return super().execute_complete(context, event)


class CleanupOldStatesOperator(HostVerbOperator):
    """Deletes the old states that the disk check listed, and only where their space is needed.

    It runs after the probe: a data set that may still be wanted isn't deleted for an extraction that can't work.

    :param disk: the disk check's verdict: what was listed (and approved) is what may be deleted.
    """

    template_fields = ("disk",)
    result_type = c.CleanupResult

    def __init__(self, *, disk: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.disk = disk

    def execute(self, context: Context) -> Any:
        """Nothing where the space is enough."""
        if not needs_cleanup(self.disk):
            self.log.info("Nothing to delete: %s", self.disk["text"])
            return None
        return self.run_verb(context)

    def verb(self, context: Context) -> list[str]:
        """``cleanup`` of exactly the list that was shown: it goes to the host as the approval."""
        host = self.host_of(context)
        with hook_of(host) as hook:
            shown = hook.put_document(c.from_dict(c.DiskVerdict, self.disk))
        return ["cleanup", "--approve", shown]

    def result(self, document: c.CleanupResult, host: dict[str, Any], context: Context) -> Any:
        """Tell what went and what was refused."""
        for path in document.deleted:
            self.log.info("deleted %s", path)
        for path, why in document.refused.items():
            self.log.warning("kept %s: %s", path, why)
        self.log.info("freed %s", human_bytes(document.freed_bytes))
        if document.refused:  # the space that was counted on is not there: better now than in mid-extraction
            kept = "; ".join(f"{path}: {why}" for path, why in document.refused.items())
            raise HostRefused(
                "cleanup", c.ErrorDoc("refused", f"not all went: {kept}", "old_states", "", "trigger again")
            )
        return c.to_dict(document)
