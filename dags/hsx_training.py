"""Train a drafter on each data set that an extraction hands off, and measure how much of it the target accepts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Param, XComArg, task_group

from hsx_operators.extraction import HIDDEN_STATES
from hsx_operators.training import (
    DRAFTER,
    AcceptanceOperator,
    CheckHandoffOperator,
    ReadHandoffsOperator,
    TrainOperator,
)

DOC = """
### What a run does
The Asset `hsx_hidden_states` starts it: each hand-off of an extraction is one training. `check_handoff` looks at the
data set from the training host, `train` runs the profile's command there as a remote job, `acceptance` serves the
target with the drafter and alone under the same prompts. The Asset `hsx_drafter` tells where the drafter is and how
it does.

### It was interrupted
Clear `train` (with *downstream*): the same data set trains in the same folder, on from its last checkpoint.

### By hand
Trigger it with a profile: its own data set is trained on, or the one whose `handoff.json` is named.
"""


@task_group(group_id="trainings", prefix_group_id=False)
def training(handoff: XComArg) -> None:
    """One data set. A group of its own for each: where one can't be trained on, the others are."""
    # Words around the name: a data set or a profile called 2026 would be rendered as a number, which is no label.
    check = CheckHandoffOperator(
        task_id="check_handoff",
        handoff=handoff,
        map_index_template="data set {{ task.handoff['dataset_id'] or task.handoff['profile'] }}",
        **CheckHandoffOperator.partial_defaults,
    )
    named: dict[str, Any] = {"map_index_template": "data set {{ task.run['dataset_id'] }}"}
    train = TrainOperator(task_id="train", run=check.output, **named, **TrainOperator.partial_defaults)
    AcceptanceOperator(
        task_id="acceptance", run=train.output, outlets=[DRAFTER], **named, **AcceptanceOperator.partial_defaults
    )


with DAG(
    dag_id="hsx_training",
    description="A drafter trained on the hidden states that an extraction handed off, and its acceptance",
    doc_md=DOC,
    schedule=[HIDDEN_STATES],
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,  # events that come meanwhile wait, and start the next run together
    params={  # as they take null, Airflow's form lets them be empty
        "profile": Param(
            "",
            type=["null", "string"],
            title="Profile",
            description="For a run by hand: the profile whose training runs. A run by the Asset takes the event's.",
            section="What",
        ),
        "handoff": Param(
            "",
            type=["null", "string"],
            title="Hand-off",
            description="For a run by hand: a handoff.json on the training host. Empty: of the profile's data set.",
            section="What",
        ),
    },
    tags=["hsx", "eagle3", "sglang"],
    default_args={"owner": "hsx", "execution_timeout": timedelta(hours=2)},
    render_template_as_native_obj=True,
) as dag:
    handoffs = ReadHandoffsOperator(task_id="handoffs")
    training.expand(handoff=handoffs.output)
