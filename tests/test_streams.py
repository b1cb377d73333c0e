"""Modules of every kind: one pass per client, side by side; augmentation from the counters; recorded schedules."""

import warnings

import numpy as np
import pytest
import torch
from network_modules import DEVICES, MODULES, gpu, silos_for
from torch import Tensor, nn

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedNMap
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.exporting.errors import full_precision
from fedcomposite.problems import Batches
from fedcomposite.problems.base import RoundInputs, Slot
from fedcomposite.problems.network.aligned import Aligned
from fedcomposite.problems.network.flat import FlatModule
from fedcomposite.problems.network.streams import Streams
from fedcomposite.runtime import EagerWarning, Simulator
from fedcomposite.schedules import Cosine, Piecewise, Staircase

SMALL = FedNMap(3, 0.01, gamma=0.5)  # at 0.05, a last bit of "statistics" is 2e-3 after 12 rounds; here 1e-6


def problem_of(name, **options):
    torch.manual_seed(3)
    return fc.Problem(silos_for(name), model=MODULES[name](), regularizer=fc.regularizers.L1(1e-3), **options)


def fit(problem, device="cpu", dtype=torch.float64, rounds=3, batch=4, method=None, **options):
    method = method or FedNMap(3, 0.05, gamma=0.5)
    return fc.simulate(problem, method, rounds=rounds, batch_size=batch, dtype=dtype, device=device, **options)


@pytest.mark.parametrize("batch", [4, None])
@pytest.mark.parametrize("name", MODULES)
def test_streams_equal_the_loop_and_a_single_site(name, batch):
    ways = {way: fit(problem_of(name, gradients=way), batch=batch) for way in ("loop", "streams")}
    site = fit(problem_of(name, gradients="loop"), batch=batch, backend="loop")
    for run in (ways["streams"], site):
        torch.testing.assert_close(run.solution, ways["loop"].solution, rtol=0, atol=1e-12)
        torch.testing.assert_close(run.buffers, ways["loop"].buffers, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
def test_every_module_trains_by_the_rule_without_a_warning(name, device):
    """The rule's way gives the loop's numbers, evaluation included; only a way that costs something is remarked on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name == "own" and device == "cpu":
            warnings.simplefilter("ignore", fc.LoopWarning)
        with full_precision():  # TF32 is another number of bits
            found = fit(problem_of(name), device, torch.float32, rounds=6, method=SMALL)
    plain = fit(problem_of(name, gradients="loop"), dtype=torch.float32, rounds=6, method=SMALL)
    assert found.history[-1].loss < found.history[0].loss
    torch.testing.assert_close(found.solution.cpu(), plain.solution, rtol=0, atol=5e-5)


@gpu
@pytest.mark.parametrize("name", MODULES)
def test_recorded_streams_are_the_eager_ones_and_resume_bit_for_bit(name, tmp_path):
    problem = problem_of(name, gradients="streams")
    runs = {mode: fit(problem, "cuda", torch.float32, rounds=6, mode=mode) for mode in ("eager", "record")}
    torch.testing.assert_close(runs["record"].solution, runs["eager"].solution, rtol=0, atol=1e-5)
    path = tmp_path / "c.pt"
    fit(problem, "cuda", torch.float32, rounds=3, mode="record", checkpoint=path)
    again = fit(problem, "cuda", torch.float32, rounds=6, mode="record", checkpoint=path, resume=True)
    assert torch.equal(again.solution, runs["record"].solution)


@gpu
@pytest.mark.parametrize("way", ["loop", "vmap", "streams"])
def test_bfloat16_passes_keep_float32_parameters(way):
    """Eight bits: 1e-3 after these rounds, far more than the 1e-6 of float32."""
    run = fit(problem_of("statistics", precision="bf16", gradients=way), "cuda", torch.float32, 12, method=SMALL)
    plain = fit(problem_of("statistics"), "cpu", torch.float32, 12, method=SMALL)
    assert run.solution.dtype == torch.float32
    torch.testing.assert_close(run.solution.cpu(), plain.solution, rtol=0, atol=0.01)
    assert (run.solution.cpu() - plain.solution).abs().max() > 5e-5


@pytest.mark.parametrize(
    ("way", "dtype"), [("loop", torch.bfloat16), ("streams", torch.bfloat16), ("vmap", torch.float32)]
)
def test_batch_norm_takes_bfloat16_as_it_comes_but_for_vmap(way, dtype, monkeypatch):
    """A copy in float32 is three times the bytes; a CPU's autocast stands in for a GPU's."""
    cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    monkeypatch.setattr(FlatModule, "_autocast", lambda self: cast)
    smooth = problem_of("statistics", precision="bf16", gradients=way).smooth(torch.float32)
    smooth.flat.restore_layout()  # a CPU's own layers do not know autocast
    seen = []
    smooth.flat.module.b.register_forward_hook(lambda _, given, out: seen.append((given[0].dtype, out.dtype)))
    x, rows = smooth.start().repeat(3, 1), torch.arange(36).view(3, 12)
    local = RoundInputs(smooth.buffers().repeat(3, 1), np.arange(3, dtype=np.uint64), 0, 0)
    found = smooth.during(local).minibatch(x, rows)
    assert set(seen) == {(dtype, dtype)}
    assert found.dtype == local.buffers.dtype == torch.float32
    monkeypatch.undo()
    plain = RoundInputs(smooth.buffers().repeat(3, 1), np.arange(3, dtype=np.uint64), 0, 0)
    other = problem_of("statistics", gradients=way).smooth(torch.float32)
    wanted = other.during(plain).minibatch(x, rows)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)
    torch.testing.assert_close(local.buffers, plain.buffers, rtol=0, atol=5e-3)


def test_a_module_that_draws_numbers_is_found_out():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x):
            return self.last(x + 0.1 * torch.randn_like(x) if self.training else x)

    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.standard_normal((9, 5)), rng.integers(0, 3, 9)) for _ in range(2)])
    runs = [fit(fc.Problem(silos, model=Noisy(), gradients=way), seed=1).solution for way in ("streams", "loop")]
    assert runs[0].shape == runs[1].shape
    torch.manual_seed(5)
    model = Noisy()
    first, second = (fit(fc.Problem(silos, model=model, gradients=w), seed=1).solution for w in ("streams", "loop"))
    assert torch.equal(first, second)  # both seed torch's generator by (seed, client, round, step)


@pytest.mark.parametrize("last", [False, True])
def test_tensors_move_to_aligned_places_and_back(last):
    shapes = {"a": (5,), "b": (4, 3, 3, 2), "c": (), "d": (6, 1, 3, 3), "e": (7, 2, 1, 1), "f": (2, 3, 4)}
    slots, at = [], 3
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        slots.append(Slot(name, at, at + size, shape))
        at += size
    x = torch.randn(3, at + 2)
    moved = Aligned(slots, channels_last=last)
    wide, out = moved.spread(x), torch.zeros_like(x)
    for i in range(3):
        tensors = moved.tensors(wide[i])
        for slot in slots:
            assert torch.equal(tensors[slot.name], x[i, slot.start : slot.stop].view(slot.shape))
            assert tensors[slot.name].storage_offset() % 64 == 0
        assert tensors["b"].is_contiguous(memory_format=torch.channels_last) == last
        moved.gather(tensors.values(), out[i])
    assert torch.equal(out[:, 3:at], x[:, 3:at])
    assert not out[:, :3].any()


@pytest.mark.parametrize("name", ["own", "statistics", "vit"])
def test_channels_last_change_nothing(name):
    plain, moved = (problem_of(name, gradients="streams").smooth() for _ in range(2))
    moved.gradients._side_by_side._parameters._last = True
    x, rows = plain.start().repeat(3, 1), torch.arange(36).view(3, 12)
    torch.testing.assert_close(moved.minibatch(x, rows), plain.minibatch(x, rows), rtol=0, atol=1e-12)


def test_counts_of_batch_norm_are_those_of_the_layers():
    """A layer that is used twice counts twice, and a cumulative mean needs its own count."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.b(self.a(self.a(x))))

    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.standard_normal((9, 5)), rng.integers(0, 3, 9)) for _ in range(2)])
    model = Twice()
    runs = [fit(fc.Problem(silos, model=model, gradients=way)).buffers for way in ("loop", "streams")]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)
    assert (runs[1] == 18).sum() == 1
    assert (runs[1] == 9).sum() == 1


def test_work_on_a_cpu_follows_one_after_another():
    seen = []
    Streams(torch.device("cpu")).run(13, seen.append)
    assert seen == list(range(13))


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_crops_and_flips_are_what_they_say():
    images = torch.arange(6 * 2 * 5 * 4, dtype=torch.float64).reshape(6, 2, 5, 4)
    words = torch.randint(0, 2**32, (6, 3), generator=torch.Generator().manual_seed(0))
    got = Chain((Crop(2), Flip()))(images, words)
    for i in range(6):
        wide = np.pad(images[i].numpy(), ((0, 0), (2, 2), (2, 2)))
        down, right, coin = (int(w) * top >> 32 for w, top in zip(words[i], (5, 5, 2), strict=True))
        window = wide[:, down : down + 5, right : right + 4]
        assert np.array_equal(got[i].numpy(), window[:, :, ::-1] if coin else window)


def test_all_crops_and_both_sides_are_drawn_alike():
    images = torch.zeros(9000, 1, 3, 3)
    images[:, 0, 1, 1] = 1
    images[:, 0, 1, 2] = 2
    words = fc.rng.words(0, fc.rng.Use.MODEL, torch.arange(9000), 0, torch.zeros(9000, dtype=torch.long), 3)
    got = Chain((Crop(1), Flip()))(images, words)
    kinds, counts = torch.unique(got.flatten(1), dim=0, return_counts=True)
    assert len(kinds) == 18
    assert counts.sum() == 9000
    assert (counts - 500).abs().max() < 5 * 500**0.5


@pytest.mark.parametrize("batch", [4, None])
def test_augmented_runs_are_one_run_in_every_backend(batch):
    augment = Chain((Crop(1), Flip()))
    runs = [
        fit(problem_of("statistics", augment=augment, gradients=way), backend=backend, batch=batch).solution
        for way, backend in (("vmap", "stacked"), ("loop", "stacked"), ("streams", "stacked"), ("loop", "loop"))
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=0, atol=1e-11)
    plain = fit(problem_of("statistics"), batch=batch).solution
    assert not torch.allclose(plain, runs[0])


@gpu
def test_augmentation_is_recorded_with_new_numbers_in_every_round():
    problem = problem_of("statistics", augment=Chain((Crop(1), Flip())))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerWarning)
        with full_precision():
            device = fit(problem, "cuda", torch.float32, rounds=6, method=SMALL, mode="record")
    host = fit(problem, "cpu", torch.float32, rounds=6, method=SMALL)
    torch.testing.assert_close(device.solution.cpu(), host.solution, rtol=0, atol=5e-5)


@pytest.mark.parametrize("way", ["vmap", "streams"])
def test_an_augmented_pass_takes_nothing_from_the_host(way, monkeypatch):
    """A copy from there, or a look at torch's generator, waits for the device, and a graph cannot hold it."""
    smooth = problem_of("statistics", gradients=way, augment=Chain((Crop(1), Flip()))).smooth().ready(False)
    x, rows = smooth.start().repeat(3, 1), torch.arange(12).view(3, 4) * 3

    def gradients():
        clients, round = np.arange(3, dtype=np.uint64), torch.tensor(7)
        local = RoundInputs(smooth.buffers().repeat(3, 1), clients, 0, round, ids=torch.arange(3))
        return smooth.during(local).minibatch(x, rows), local.buffers

    def refuse(*given, **named):
        raise AssertionError("the host was asked")

    expected = gradients()
    monkeypatch.setattr(torch, "from_numpy", refuse)
    monkeypatch.setattr(torch.random, "fork_rng", refuse)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


# -- schedules --------------------------------------------------------------------------------------------------------


def test_a_staircase_keeps_the_value_of_its_first_round():
    inner = Cosine(0.1, 0.01, rounds=40)
    stairs = Staircase(10, inner)
    assert [stairs(r) for r in (0, 9, 10, 19, 35)] == [inner(r) for r in (0, 0, 10, 10, 30)]
    assert fc.schedules.read(stairs.table) == stairs


def test_scheduled_rounds_are_recorded_where_steps_stay():
    """A function of the round alone: a resumed run takes the same path."""
    problem = problem_of("own", gradients="loop")
    step = Piecewise((0.1, 0.05, 0.01), (12, 15))
    transport = Simulator(problem, FedAvg(2, step), batches=Batches(0, 4)).transport
    assert [transport._stays(r) for r in (0, 5, 11, 12, 14, 15, 40)] == [True, True, True, False, False, True, True]
    cosine = Simulator(problem, FedAvg(2, Cosine(0.1, 0.01, rounds=50)), batches=Batches(0, 4)).transport
    assert [cosine._stays(r) for r in (0, 20, 48, 49, 80)] == [False, False, False, True, True]


@gpu
def test_a_scheduled_run_is_recorded_step_by_step_of_its_stairs():
    problem = problem_of("own", gradients="streams")
    method = FedNMap(3, Staircase(10, Cosine(0.1, 0.01, rounds=30)), gamma=0.5)
    runs = [fit(problem, "cuda", torch.float32, rounds=30, method=method, mode=m).solution for m in ("record", "eager")]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-4)


# -- the small stem ---------------------------------------------------------------------------------------------------


def test_the_small_stem_keeps_the_image():
    module = fc.models.build("resnet18", "cifar10", stem="small")
    seen: list[Tensor] = []
    module.layer1.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen[0].shape == (2, 64, 32, 32)
    assert sum(p.numel() for p in module.parameters()) == 11_173_962
    with pytest.raises(ValueError, match="stem = 'tiny'"):
        fc.models.build("resnet18", "cifar10", stem="tiny")
