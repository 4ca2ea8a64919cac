"""Training on a handed-off data set: which hand-offs, the check where it trains, the training, the acceptance."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import Asset, BaseOperator

from hsx_host import contract as c
from hsx_operators import errors
from hsx_operators.answers import human_seconds
from hsx_operators.base import HostVerbOperator, host_run_id
from hsx_operators.extraction import HIDDEN_STATES
from hsx_operators.hook import GpuHostHook
from hsx_operators.profile import load_profile
from hsx_operators.profile_files import default_profile
from hsx_operators.retry import HOST_RETRIES
from hsx_operators.spec import build_spec

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

#: Updated by each training that ends well; ``extra`` has the drafter's folder and its acceptance.
DRAFTER = Asset("hsx_drafter")

#: Params of the training DAG.
PARAMS = ("profile", "handoff")


class ReadHandoffsOperator(BaseOperator):
    """Which data sets are to be trained on: those of the Asset's events, or the one that the Params name.

    Several events of one data set are one training, on its newest hand-off. A data set whose profile has no training is
    left out and named in the log; one whose profile can't be read fails in its own check. The XCom is a list of
    ``{"profile", "handoff", "manifest", "dataset_id"}``.
    """

    ui_color = "#f3e6c8"

    def execute(self, context: Context) -> list[dict[str, str]]:
        """From the triggering events; a run by hand takes its Params."""
        params = dict(context["params"])
        for key in {**params, **(context["dag_run"].conf or {})}:
            if key not in PARAMS:
                raise errors.ConfigError("there is no such Param", field=key, fix=f"known: {', '.join(PARAMS)}")
        found = from_events([e.extra for e in (context.get("triggering_asset_events") or {}).get(HIDDEN_STATES, [])])
        if not found:
            name = str(params.get("profile") or default_profile())
            found = [{"profile": name, "handoff": str(params.get("handoff") or ""), "manifest": "", "dataset_id": ""}]
            if load_profile(name).training is None:
                raise errors.ConfigError("has no training", field="profile", value=name, fix="add training to it")
            return found
        kept = []
        for one in found:
            try:
                none = load_profile(one["profile"]).training is None
            except errors.ProfileError as e:  # the event won't come again: this data set's own check fails with it
                self.log.error("%s: %s", one["dataset_id"], e)
                none = False
            if none:
                self.log.warning("%s: profile %s has no training", one["dataset_id"], one["profile"])
            else:
                self.log.info("%s: %s", one["dataset_id"], one["handoff"])
                kept.append(one)
        return kept


def from_events(extras: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The newest hand-off of each data set, in the order in which they came."""
    newest: dict[tuple[str, str], dict[str, str]] = {}
    for extra in extras:
        if not isinstance(extra, dict) or "dataset_id" not in extra:
            continue  # an event made by hand in the UI says nothing: the Params count
        key = (str(extra["profile"]), str(extra["dataset_id"]))
        newest.pop(key, None)
        newest[key] = {
            "profile": key[0],
            "handoff": str(extra["path"]),
            "manifest": str(extra["manifest_sha256"]),
            "dataset_id": key[1],
        }
    return list(newest.values())


class CheckHandoffOperator(BaseOperator):
    """Freezes the training, ships the program to the training host and checks the hand-off there.

    In a mapped group: one a data set. Its XCom says to the tasks behind it where the host is and what is to be trained.

    :param handoff: one entry of ``ReadHandoffsOperator``.
    """

    template_fields = ("handoff",)
    partial_defaults: ClassVar[dict[str, Any]] = {
        "retries": 3,
        "retry_delay": timedelta(seconds=30),
        "retry_policy": HOST_RETRIES,
    }
    ui_color = "#dde8f5"

    def __init__(self, *, handoff: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.handoff = handoff

    def execute(self, context: Context) -> dict[str, Any]:
        """``training-check``."""
        one = dict(self.handoff)
        profile = load_profile(one["profile"])
        spec = build_spec(profile, one["profile"], {}, f"training {host_run_id(context)}")
        if profile.training is None:
            raise errors.ConfigError("has no training", field="profile", value=one["profile"], fix="add training to it")
        where = profile.training.host or profile.host
        with GpuHostHook(where.ssh_conn_id, where.python, where.home) as hook:
            hook.ship()
            there = c.from_dict(c.RunSpec, c.to_dict(spec) | {"host": _host(spec, where.python, where.home)})
            path = hook.put_document(there)
            verb = ["training-check"]
            verb += ["--handoff", one["handoff"]] if one["handoff"] else []
            verb += ["--manifest", one["manifest"]] if one["manifest"] else []
            found = hook.run_verb(c.HandoffCheck, verb, spec_path=path, timeout_s=600)
            run = {
                "ssh_conn_id": where.ssh_conn_id,
                "python": where.python,
                "home": where.home,
                "bundle": hook.bundle,
                "bundle_dir": hook.bundle_dir,
                "spec_path": path,
                "profile": one["profile"],
                "handoff": found.handoff,
                "manifest": found.manifest_sha256,
                "dataset_id": found.dataset_id,
                "acceptance": profile.training.acceptance is not None,
            }
        self.log.info(
            "%s: %d samples, %s tokens in %s", found.dataset_id, found.samples, f"{found.tokens:,}", found.data
        )
        self.log.info("training in %s: %s", found.work, " ".join(found.command))
        return run


def _host(spec: c.RunSpec, python: str, home: str) -> dict[str, Any]:
    """The spec's host as the training host is: its own Python and home, the data under the same path."""
    return {"python": python, "home": home, "output_root": spec.host.output_root, "old_state_roots": []}


class TrainingVerbOperator(HostVerbOperator):
    """A verb on the training host. In a mapped group: ``run`` is the XCom of the task before it.

    It takes no slot of the extraction's pool: a training of days must not keep the nightly run waiting.

    :param run: where the training host is, and what is trained.
    """

    template_fields = ("run",)
    partial_defaults: ClassVar[dict[str, Any]] = {
        "retries": 3,
        "retry_delay": timedelta(seconds=30),
        "retry_policy": HOST_RETRIES,
        "pool": "default_pool",
    }

    def __init__(self, *, run: Any, job_timeout: timedelta | None = timedelta(days=14), **kwargs: Any) -> None:
        super().__init__(job_timeout=job_timeout, **kwargs)
        self.run = run

    def host_of(self, context: Context) -> dict[str, Any]:
        """The mapped argument."""
        return dict(self.run)


class TrainOperator(TrainingVerbOperator):
    """The profile's training command as a remote job. A retry, or a clear, goes on from its checkpoints."""

    result_type = c.TrainingResult

    def verb(self, context: Context) -> list[str]:
        """``train``."""
        return ["train", "--handoff", self.run["handoff"], "--manifest", self.run["manifest"]]

    def result(self, document: c.TrainingResult, host: dict[str, Any], context: Context) -> Any:
        """Where the drafter is; the acceptance's ``run``."""
        how = "went on from a checkpoint" if document.resumed else "from the start"
        self.log.info("%s %s: %s after %s", document.name, how, document.drafter, human_seconds(document.seconds))
        return {**host, "drafter": document.drafter, "training": c.to_dict(document)}


class AcceptanceOperator(TrainingVerbOperator):
    """Serves the target with the drafter and alone, and tells acceptance length and speed; updates ``hsx_drafter``."""

    result_type = c.AcceptanceResult

    def execute(self, context: Context) -> Any:
        """Nothing to measure where the profile has no acceptance: the drafter is told all the same."""
        host = self.host_of(context)
        if not host["acceptance"]:
            self.log.info("The profile has no acceptance.")
            return self._tell(host, None, context)
        return self.run_verb(context)

    def verb(self, context: Context) -> list[str]:
        """``acceptance``."""
        return ["acceptance", "--handoff", self.run["handoff"], "--drafter", self.run["drafter"]]

    def result(self, document: c.AcceptanceResult, host: dict[str, Any], context: Context) -> Any:
        """Tell the figures."""
        self.log.info("%s", document.text)
        return self._tell(host, c.to_dict(document), context)

    def _tell(self, host: dict[str, Any], acceptance: dict[str, Any] | None, context: Context) -> Any:
        told = {
            "drafter": acceptance["drafter"] if acceptance else host["drafter"],
            "dataset_id": host["dataset_id"],
            "profile": host["profile"],
            "handoff": host["handoff"],
            "acceptance": acceptance,
        }
        context["outlet_events"][DRAFTER].extra = told
        return told
