"""Gradients of two optimizers or models in a process do not mix, and workers that use a name for
different things get an error.
"""

from __future__ import annotations

import pytest

from support.jobs import run

_MODELS = """
    import warnings
    import torch
    import bpsx
    import bpsx.torch as bps
    torch.set_num_threads(1)
    bps.init()
    rank = bps.rank()

    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 2, bias=False).double()

    def backward(model, scale):
        (model(torch.full((1, 3), rank + 1.0, dtype=torch.double)) * scale).sum().backward()

    def average(scale):
        return [[scale * 1.5] * 3] * 2      # of workers 0 and 1
"""


def test_backward_passes_of_two_models_may_come_in_another_order():
    source = (
        _MODELS
        + """
    def pair(name):
        models = [net(1), net(2)]
        made = []
        for i, model in enumerate(models):
            bps.broadcast_parameters(model.state_dict(), 0, prefix=f"{name}{i}.")
            given = [(f"{name}{i}.weight", model.weight)] if name == "named" else None
            made.append(
                bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), given)
            )
        return models, made


    def steps(models, optimizers, extra=()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for i in (0, 1) if rank == 0 else (1, 0):
            backward(models[i], 10.0**i)
            for added in extra[i : i + 1]:
                (added * (rank + 1) * 10.0**i).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return [m.weight.grad.tolist() for m in models] + [e.grad.tolist() for e in extra]


    wanted = [average(1.0), average(10.0)]
    models, optimizers = pair("unnamed")
    report([steps(models, optimizers) == wanted for _ in range(2)])
    models, named = pair("named")
    extra = [torch.nn.Parameter(torch.ones(2, dtype=torch.double)) for _ in range(2)]
    for optimizer, added in zip(named, extra):
        optimizer.add_param_group({"params": [added]})
    report(steps(models, named, extra) == wanted + [[1.5, 1.5], [15.0, 15.0]])
    bps.shutdown()
    """
    )
    assert run(source) == [[[True, True], True]] * 2


def test_two_ddp_models_with_the_default_hook(tmp_path):
    source = (
        _MODELS
        + f"""
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
    models = [torch.nn.parallel.DistributedDataParallel(net(i)) for i in range(2)]
    for model in models:
        model.register_comm_hook(None, bps.ddp_comm_hook)
    found = []
    for step in range(2):
        losses = {{}}
        for i in (0, 1) if rank == 0 else (1, 0):       # backward runs in the opposite order
            models[i].zero_grad()
            x = torch.full((1, 3), rank + 1.0, dtype=torch.double)
            losses[i] = models[i](x).sum() * 10.0 ** i
        sum(losses.values()).backward()
        averages = [m.module.weight.grad.tolist() for m in models]
        found.append(averages == [average(1.0), average(10.0)])
    report(found)
    state = bps.DDPHookState("one name")
    twins = [torch.nn.parallel.DistributedDataParallel(net(i)) for i in range(2)]
    for model in twins:
        model.register_comm_hook(state, bps.ddp_comm_hook)
    backward(twins[0], 1.0)
    try:
        backward(twins[1], 1.0)
        report("no error")
    except Exception as e:
        report("another model that is still alive uses 'one name' for its buckets" in str(e))
    dist.destroy_process_group()
    bps.shutdown()
    """
    )
    assert run(source) == [[[True, True], True]] * 2


@pytest.mark.parametrize(
    "other",
    [
        # The same names and shapes in another order. The count of workers with a gradient goes by
        # position.
        "[('a', models[0].weight), ('b', models[1].weight)][::1 if rank == 0 else -1]",
        # Generated names, and a set whose order differs between workers.
        None,
    ],
)
def test_workers_that_use_a_name_for_different_things_get_an_error(other):
    given = (
        """
        parameters = [m.weight for m in models]
        optimizers = [bps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), OTHER)]
    """.replace("OTHER", str(other))
        if other
        else """
        order = models if rank == 0 else models[::-1]
        optimizers = [
            bps.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in order
        ]
    """
    )
    source = (
        _MODELS
        + """
    models = [net(1), net(2)]
    for i, model in enumerate(models):
        bps.broadcast_parameters(model.state_dict(), 0, prefix=f"{i}.")
    if True:"""
        + given
        + """
    before = [m.weight.tolist() for m in models]
    for i, model in enumerate(models):
        backward(model, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizers[0].step()
            report("no error")
        except bpsx.MismatchError as e:
            report(str(e))
    report([m.weight.tolist() for m in models] == before)
    bps.shutdown()
    """
    )
    for text, unchanged in run(source):
        wanted = (
            "worker 1 has other names of parameters than worker 0, or the same names in another"
            if other
            else (
                "the workers have created their optimizers in different orders. Give"
                " named_parameters"
            )
        )
        assert wanted in text and unchanged


_WEIGHTS = (
    _MODELS
    + """
    from bpsx.torch.cross_barrier import CrossBarrier
    from bpsx.torch.parallel import DistributedDataParallel


    def train(kind, broadcast):
        model = net(7 + (rank if broadcast != "equal seeds" else 0))
        if broadcast is True:
            bps.broadcast_parameters(model.state_dict(), root_rank=0)
        if kind is DistributedDataParallel:
            model = kind(model, init_sync=False)
            backward(model, 1.0)
            return
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = (
            kind(model, sgd) if kind is CrossBarrier else kind(sgd, model.named_parameters())
        )
        for step in range(2):
            backward(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()


    for kind in bps.DistributedOptimizer, CrossBarrier, DistributedDataParallel:
        for broadcast in True, "equal seeds", False:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    train(kind, broadcast)
                    error = ""
                except bpsx.MismatchError as e:
                    error = str(e)
            report([error, [str(w.message) for w in heard if "weights" in str(w.message)]])
    bps.shutdown()
"""
)


@pytest.mark.parametrize("option", [None, "error", "off"])
def test_weights_that_differ_before_the_first_step(option):
    for found in run(_WEIGHTS, env={} if option is None else {"BPSX_CHECK_WEIGHTS": option}):
        assert len(found) == 9
        for i, (error, heard) in enumerate(found):
            if i % 3 < 2 or option == "off":
                assert (error, heard) == ("", []), i
                continue
            (text,) = [error] if option == "error" else heard
            assert (error == "") == (option is None)
            assert "worker 1 has other weights than worker 0 before the first step" in text
            assert "broadcast_parameters(model.state_dict(), root_rank=0)" in text
