"""Training frameworks for PyTorch under bpsx-run and torchrun give the same model.

Each framework is optional.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.torch_job import launch
from support.torchrun_job import Torchrun

# bpsx is imported only after PyTorch's own calls, as in a script that does not use bpsx.
PLAIN = """
    import os, sys
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(2)
    dist.all_reduce(total)
    place = [
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ]
    assert place[:2] == [dist.get_rank(), dist.get_world_size()]
    dist.destroy_process_group()
    import bpsx.torch as bps

    bps.init()
    assert place == [bps.rank(), bps.size(), bps.local_rank(), bps.local_size()]
    sys.stdout.write(f"TOTAL {place[0]} {int(total[0])}\\n")
"""
COMMON = """
    import hashlib, os, sys, tempfile
    import torch, torch.distributed as dist
    import bpsx.torch as bps

    backend = sys.argv[1]
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 8, generator=made), torch.randn(32, 1, generator=made)

    def tell(model, count):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        digest = hashlib.sha1(weights.numpy().tobytes()).hexdigest()
        bps.init()      # bpsx-run counts workers that never join as lost
        sys.stdout.write(f"WEIGHTS {os.environ['RANK']} {count} {dist.get_backend()} {digest}\\n")
"""
ACCELERATE = """
    if backend == "bpsx":
        dist.init_process_group("bpsx")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for a, b in data:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(a), b))
        optimizer.step()
    tell(model, accelerator.num_processes)
"""
TRAINER = """
    if backend == "bpsx":
        dist.init_process_group("bpsx")
    from transformers import Trainer, TrainingArguments


    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x=None, labels=None):
            found = self.layer(x)
            return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=os.environ["BYTEPS_SOCKET_PATH"]),
        use_cpu=True,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = Trainer(
        model=Model(), args=arguments, train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y)]
    )
    trainer.train()
    tell(trainer.model, arguments.world_size)
"""
LIGHTNING = """
    import lightning
    from lightning.pytorch.strategies import DDPStrategy


    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)


    lightning.seed_everything(3)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend=backend),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(
        model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    )
    tell(model, trainer.world_size)
"""
SCRIPTS = {"accelerate": ACCELERATE, "transformers": TRAINER, "lightning": LIGHTNING}


@pytest.mark.parametrize(
    "shape", [{"workers": 2, "servers": 1}, {"workers": 1, "servers": 0, "processes": 2}]
)
def test_a_plain_pytorch_script_runs_under_bpsx_run(tmp_path: Path, shape: dict[str, int]) -> None:
    """A script needs neither bpsx nor variables to rendezvous at PyTorch's store."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PLAIN))
    status, output = launch([sys.executable, str(script)], **shape)
    assert status == 0 and all(f"TOTAL {rank} 2" in output for rank in range(2)), output[-3000:]


def test_a_machine_started_by_its_role(tmp_path: Path) -> None:
    """Processes of a single machine get a store even without a scheduler and servers."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PLAIN))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "bpsx.launch", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **clean,
            "DMLC_ROLE": "worker",
            "BYTEPS_LOCAL_SIZE": "2",
            "BYTEPS_SOCKET_PATH": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0 and all(f"TOTAL {rank} 2" in done.stdout for rank in range(2)), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("framework", SCRIPTS)
def test_one_model_as_under_torchrun(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    source = textwrap.dedent(COMMON) + textwrap.dedent(SCRIPTS[framework])
    with Torchrun(tmp_path, source, "gloo", HF_HUB_OFFLINE="1") as job:
        statuses, output = job.wait()
    assert statuses == [0], output[-3000:]
    expected = weights(output, "gloo")
    for backend in ("gloo", "bpsx"):
        status, output = launch(
            [sys.executable, str(tmp_path / "script.py"), backend],
            workers=1,
            servers=0,
            processes=2,
            HF_HUB_OFFLINE="1",
            BYTEPS_SOCKET_PATH=str(tmp_path),
        )
        assert status == 0, output[-3000:]
        assert weights(output, backend) == expected


def weights(output: str, backend: str) -> str:
    """Return the digest of the workers' weights, after checking that both are equal."""
    found = re.findall(rf"WEIGHTS (\d) 2 {backend} (\w+)", output)
    assert (
        sorted(rank for rank, _ in found) == ["0", "1"]
        and len({digest for _, digest in found}) == 1
    ), output[-3000:]
    return str(found[0][1])


pytestmark = pytest.mark.timeout(300)
