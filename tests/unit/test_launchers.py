"""The place that other launchers' variables give a process; incomplete sets of variables."""

from __future__ import annotations

import json

import pytest

from bpsx.api.lifecycle import launched_fields
from bpsx.config import Config, place_fields
from bpsx.config.launchers import first_node, place
from bpsx.errors import ConfigError

STORE = {"MASTER_ADDR": "far", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
}
TF = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
    "task": {"type": "worker", "index": 1},
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, None, None)),  # Kubeflow
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1, None)),
        (
            {
                "HOROVOD_RANK": "1",
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
            },
            (1, 2, 0, 1),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "2",
            },
            (2, 4, 0, 2),
        ),
        ({"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"}, (2, 4, None, None)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 2, 1, 2),
        ),
        (SLURM, (3, 4, 1, 2)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, (3, 4, 1, None)),
        # Daemons of mpirun that srun has started: mpirun's variables count.
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8"}, (7, 8, None, None)),
        ({**SLURM, "RANK": "9", "WORLD_SIZE": "16"}, (9, 16, None, None)),
        ({"TF_CONFIG": json.dumps(TF)}, (2, 3, 0, 1)),
    ],
)
def test_each_launchers_variables_give_a_worker_its_place(variables, expected):
    found = place({**STORE, **variables})
    assert (found.rank, found.size, found.local_rank, found.local_size) == expected
    if "TF_CONFIG" not in variables:
        assert (found.master_addr, found.master_port) == ("far", 29500)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        STORE,
        {"RANK": "captain"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "-1"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {
            "SLURM_NTASKS": "8",
            "SLURM_JOB_NODELIST": "gpu[03-04]",
            "SLURM_JOB_ID": "71",
        },  # a shell from salloc
        {"TF_CONFIG": "no JSON"},
        {"TF_CONFIG": "3"},
        {"TF_CONFIG": json.dumps({**TF, "task": {"type": "ps", "index": 0}})},
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
            )
        },
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "DMLC_WORKER_ID": "0",
        },  # bpsx's own variables
        {"RANK": "1", "BYTEPS_LOCAL_RANK": "0"},
    ],
)
def test_other_variables_give_no_place(variables):
    assert place(variables) is None


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"LOCAL_WORLD_SIZE": "2"}, "RANK"),
        ({"LOCAL_RANK": "1"}, "WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"PMIX_RANK": "0"}, "WORLD_SIZE"),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_SIZE"),
    ],
)
def test_a_launcher_that_sets_only_rank_or_size_is_refused(variables, missing):
    with pytest.raises(
        ConfigError, match=rf"^{next(iter(variables))}=.*{missing}.*DMLC_WORKER_ID=0"
    ):
        place({**STORE, **variables})


def test_two_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="WORLD_SIZE=3, but OMPI_COMM_WORLD_SIZE=2"):
        place({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "3"})
    with pytest.raises(ConfigError, match="SLURM_PROCID=4: expected 0..3"):
        place({**SLURM, "SLURM_PROCID": "4"})


def test_tasks_of_srun_meet_at_the_first_node():
    """All tasks of an srun step compute the same port; the next step gets another one."""
    found = [
        place({**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)})
        for rank in range(4)
    ]
    assert {(p.master_addr, p.run) for p in found} == {("gpu03", "slurm-71.0")}
    assert len({p.master_port for p in found}) == 1 and 20000 <= found[0].master_port < 30000
    assert place({**SLURM, "SLURM_STEP_ID": "1"}).master_port != found[0].master_port
    assert place({**SLURM, "SLURM_DISTRIBUTION": "arbitrary"}).master_addr == ""
    assert place({**SLURM, **STORE}).master_addr == "far"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3,7],b", "a1"),
        ("a[007]", "a007"),
        ("r[1-2]n[03-04]", "r1n03"),
        ("a1.example.org,b", "a1.example.org"),
    ],
)
def test_first_node(nodes, first):
    assert first_node(nodes) == first


def test_fields_of_a_place():
    def fields(rank, local_rank):
        return place_fields(
            place(
                {
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_SIZE": "4",
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                }
            )
        )

    assert fields(3, 1) == {"num_worker": 2, "local_size": 2, "worker_id": 1, "local_rank": 1}
    assert fields(2, 1) is None  # mpirun --map-by node
    assert launched_fields(place({"RANK": "0", "WORLD_SIZE": "1"})) == {}


# ---- bpsx's own variables

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NUM_SERVER": "2",
}


@pytest.mark.parametrize("more", [{}, {"DMLC_NUM_WORKERS": "2"}, {"BYTEPS_LOCAL_SIZE": "2"}])
def test_a_forgotten_number_of_workers_is_missing(more):
    """A forgotten DMLC_NUM_WORKER is an error, as scheduler and servers would wait for ever."""
    with pytest.raises(
        ConfigError, match="DMLC_NUM_WORKER is not set.*BYTEPS_FORCE_DISTRIBUTED=1"
    ) as told:
        Config({**JOB, **more}).check()
    assert ("did you mean DMLC_NUM_WORKER?" in str(told.value)) == ("DMLC_NUM_WORKERS" in more)
    Config({**JOB, **more, "BYTEPS_FORCE_DISTRIBUTED": "1"}).check()


def test_a_job_of_one_says_that_servers_are_not_used():
    one = Config({**JOB, "DMLC_NUM_WORKER": "1"})
    one.check()
    assert any(
        "but a job of one worker does not use them" in text and "BYTEPS_FORCE_DISTRIBUTED=1" in text
        for text in one.unknown
    )
    for more in (
        {"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "0"},
        {"DMLC_NUM_WORKER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"},
        {"DMLC_NUM_WORKER": "1", "BYTEPS_ENABLE_ASYNC": "1"},
        {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "0"},
    ):
        assert Config({**JOB, **more}).unknown == (), more


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"),
        ("DMLC_PS_ROOT_ADDR", "DMLC_PS_ROOT_URI"),
        ("DMLC_WORKERID", "DMLC_WORKER_ID"),
        ("PS_VERBOSITY", "PS_VERBOSE"),
    ],
)
def test_misspelt_names_of_upstreams(name, meant):
    assert Config({name: "1"}).unknown == (f"{name} is not a known option; did you mean {meant}?",)


@pytest.mark.parametrize(
    "name",
    ["DMLC_TASK_ID", "DMLC_TRACKER_URI", "DMLC_LOG_STACK_TRACE", "PS_FORMAT", "PS_PERSONALITY"],
)
def test_variables_of_other_programs_get_no_warning(name):
    assert Config({name: "1"}).unknown == ()
