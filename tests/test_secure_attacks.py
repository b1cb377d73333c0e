"""Secure sums under attack: the coordinator with all its traffic, sites that go away at every phase, forged orders."""

import itertools
import json
import math
import secrets

import numpy as np
import pytest
import tomli_w
import torch
from local_federation import LocalSites, alone, federate, make_sites, method, opened, write
from secure_sites import make_keys, make_site, secure_sites

import fedcomposite as fc
from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.orders import Key, Order
from fedcomposite.federation.secure import keys, masking
from fedcomposite.federation.secure.keys import bundle
from fedcomposite.federation.secure.masking import Numbers
from fedcomposite.federation.shape import parse
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.simulator import simulate
from fedcomposite.testing import small_problem

WAIT = Settings(secure=True)
SKIP = Settings("skip", secure=True, patience=0.0)
TEXT = write(method("Scaffold"), rounds=3)


@pytest.fixture(scope="module")
def silos():
    base = small_problem(method("FedNMap")).silos
    return Silos.from_arrays([base[i] for i in range(4)], names=["a", "b", "c", "d"])


def order_of(content):
    return Order.read(wire.text(content, "order"))


def changed(content, **fields):
    """An order with another secure part, its vectors as they were."""
    order = order_of(content)
    secure = order.secure.model_copy(update=fields.pop("secure", {}))
    text = order.model_copy(update={**fields, "secure": secure}).model_dump_json()
    record = dict(content)
    return {**record, "order": text}


# -- what the coordinator sees ----------------------------------------------------------------------------------------


def integers(wide):
    return [int.from_bytes(row.tobytes(), "little") for row in wide]


def octets_of(integers):
    return b"".join(n.to_bytes(16, "little") for n in integers)


class Notes:
    """All streams that masks were made of, and what each site had to hide."""

    def __init__(self, monkeypatch):
        self.streams, self.hidden = {}, []
        stream, conceal = masking._stream, masking.conceal

        def noted(key, size):
            return self.streams.setdefault(key, stream(key, size))

        def noting(numbers, me, seeds, own, context):
            before = Numbers(numbers.words.copy(), numbers.wide.copy())
            after = conceal(numbers, me, seeds, own, context)
            self.hidden.append((me, before, dict(seeds), own, context, Numbers(after.words.copy(), after.wide.copy())))
            return after

        monkeypatch.setattr(masking, "_stream", noted)
        monkeypatch.setattr(masking, "conceal", noting)
        self.conceal = conceal


def test_the_same_view_belongs_to_any_other_vectors_with_the_same_sum(silos, tmp_path, monkeypatch):
    """World A is a run with all its traffic. In world B the sites' numbers are others, with the same sums: for every
    sum there are streams under which each site sends the very same bytes. So nothing in the traffic tells A from B, as
    long as streams of unknown keys pass for random ones.
    """
    notes = Notes(monkeypatch)
    grid = LocalSites(secure_sites(silos, tmp_path))
    federate(grid, TEXT, WAIT)
    sent = b"".join(wire.encode(answer) for _, _, answer in grid.log)
    sums = {}
    for one in notes.hidden:
        sums.setdefault(one[4], []).append(one)
    assert len(sums) == 1 + 3 + 4  # introductions, rounds, evaluations
    rng = np.random.default_rng(0)
    for context, each in sums.items():
        each.sort(key=lambda one: one[0])
        names = [one[0] for one in each]
        assert names == ["a", "b", "c", "d"]
        size, wide = each[0][1].words.size, len(each[0][1].wide)
        other = [rng.integers(0, 2**64, size, dtype=np.uint64) for _ in names[1:]]  # anything at all ...
        other.append(
            sum((one[1].words for one in each), np.zeros(size, np.uint64)) - sum(other, np.zeros(size, np.uint64))
        )
        scalars = [[int(v) for v in rng.integers(0, 2**63, wide)] for _ in names[1:]]
        total = [sum(column) for column in zip(*(integers(one[1].wide) for one in each), strict=True)]
        scalars.append([(t - sum(c)) % 2**128 for t, c in zip(total, zip(*scalars, strict=True), strict=True)])
        # ... with the same sum. The streams between neighbours take up the differences, one after another.
        carry, wide_carry = np.zeros(size, np.uint64), [0] * wide
        table = dict(notes.streams)
        for i, (me, next_one) in enumerate(itertools.pairwise(names)):
            carry = carry + each[i][1].words - other[i]
            mine = integers(each[i][1].wide)
            wide_carry = [(c + a - b) % 2**128 for c, a, b in zip(wide_carry, mine, scalars[i], strict=True)]
            seed = each[i][2][next_one]
            key, wide_key = (masking.derive(seed, context + part) for part in (b"words", b"wide"))
            table[key] = (np.frombuffer(notes.streams[key], np.uint64) + carry).tobytes()
            old = integers(Numbers.read_wide(notes.streams[wide_key]))
            table[wide_key] = octets_of([(a + b) % 2**128 for a, b in zip(old, wide_carry, strict=True)])
            assert masking.side(me, next_one) == 1
        monkeypatch.setattr(masking, "_stream", lambda key, size, table=table: table[key])
        for i, (me, _, seeds, own, _, after) in enumerate(each):
            hidden = Numbers(other[i].copy(), Numbers.read_wide(octets_of(scalars[i])))
            again = notes.conceal(hidden, me, seeds, own, context)
            assert again.words.tobytes() == after.words.tobytes()
            assert again.wide_bytes() == after.wide_bytes()
            assert after.words.tobytes() in sent
            assert after.wide_bytes() in sent


@pytest.mark.parametrize("settings", [WAIT, SKIP], ids=["wait", "skip"])
def test_no_unmasked_number_crosses(settings, silos, tmp_path, monkeypatch):
    """Of what a site computed nothing is in what it sends: not as a float, not as a fixed-point number, not as text."""
    notes = Notes(monkeypatch)
    grid = LocalSites(secure_sites(silos, tmp_path, opened(changing_cohorts=True)))
    federate(grid, TEXT, settings)
    for name in silos.names:
        sent = b"".join(wire.encode(answer) for site, _, answer in grid.log if site == name)
        mine = [one[1] for one in notes.hidden if one[0] == name]
        for numbers in mine:
            words = numbers.words.view(np.uint64)
            secret = {word.tobytes() for word in words[words >= 1 << 24]}  # smaller ones may be lengths in the packing
            floats = [*numbers.vector(), *numbers.scalars()]
            secret |= {np.float64(v).tobytes() for v in floats if v not in (0.0, 1.0)}
            secret |= {v.to_bytes(16, "little")[6:14] for v in integers(numbers.wide) if v not in (0, 1 << 64)}
            secret |= {repr(v).encode() for v in floats if v != int(v)}
            secret.discard(bytes(8))  # of the share of the range, which is small
            assert secret
            assert not [s for s in secret if s in sent]
        for _, _, answer in (one for one in grid.log if one[0] == name):
            kind = wire.kind(answer)
            if kind == "report":
                assert set(wire.numbers(answer)) == {"round"}
            elif kind == "introduction":
                told = json.loads(wire.text(answer, "introduction"))
                assert told["samples"] is None
                assert told["scale"] is None
                assert told["smoothness"] is None
            else:
                assert kind == "secure"


def test_what_is_sent_looks_uniform_and_never_repeats(silos, tmp_path):
    """The words of all sites and sums: bytes uniform, no word twice."""
    grid = LocalSites(secure_sites(silos, tmp_path))
    federate(grid, write(method("Scaffold"), rounds=12), WAIT)
    words = np.concatenate(
        [
            wire.deserialise(answer["vectors"])[f"{p}.words"].numpy()
            for _, content, answer in grid.log
            if wire.kind(answer) == "report"
            for p in ["train"] * order_of(content).train + ["evaluate"] * order_of(content).evaluate
        ]
    )
    assert len(np.unique(words)) == len(words) > 700
    octets = words.view(np.uint8)
    seen = np.bincount(octets, minlength=256)
    assert ((seen - len(octets) / 256) ** 2 / (len(octets) / 256)).sum() < 255 + 8 * 510**0.5


# -- sites that go away -----------------------------------------------------------------------------------------------


PHASES = ["keys", "shares", "sum", "open"]


class Dropping(LocalSites):
    """Answers of some sites that do not arrive, from a phase of a round on."""

    def __init__(self, sites, drop, phase, round=1):
        super().__init__(sites)
        self.drop, self.phase, self.round, self.phases = drop, phase, round, set()

    def push(self, orders):
        made = super().push(orders)
        for site, payload in orders.items():
            order = order_of(wire.decode(payload))
            phase = order.secure.phase if order.secure else "sum"
            self.phases.add((order.site, phase, order.round))
            late = PHASES.index(phase) >= PHASES.index(self.phase)
            if order.site in self.drop and order.round == self.round and late:
                self._replies.pop(made[site])
        return made


@pytest.mark.parametrize("phase", ["keys", "shares", "sum", "open"])
def test_skip_without_a_site_that_goes_away_at_a_phase(phase, silos, tmp_path):
    """Round 2 goes on with three of four: the same as a plain federation whose round 2 misses that site."""
    limits = opened(changing_cohorts=True)
    keys = make_keys(silos.names)
    sites = [make_site(silos, i, tmp_path / "one", keys, limits) for i in range(4)]
    grid = Dropping(sites, "b", phase)
    _, run = federate(grid, TEXT, SKIP)
    # At "open" its numbers had arrived, and three of four open the sum.
    plain = Dropping(make_sites(silos, tmp_path / "two"), "" if phase == "open" else "b", "sum")
    _, want = federate(plain, TEXT, Settings("skip", patience=0.0))
    assert ("b", phase, 1) in grid.phases
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    assert [r.get("sites") for r in run.history] == [r.get("sites") for r in want.history]
    for a, b in zip(run.history, want.history, strict=True):
        assert a["objective"] == pytest.approx(b["objective"], abs=1e-9)


@pytest.mark.parametrize("phase", PHASES)
def test_two_of_four_missing_refuses_the_round(phase, silos, tmp_path):
    """Fewer than the threshold are left: an error, and no sum."""
    sites = secure_sites(silos, tmp_path, opened(changing_cohorts=True, min_parties=3))
    grid = Dropping(sites, "bc", phase)
    with pytest.raises(FederationError, match=r"fewer than min_sites = 1|are needed"):
        federate(grid, TEXT, SKIP)
    assert ("b", phase, 1) in grid.phases


@pytest.mark.parametrize("phase", ["keys", "shares", "sum"])
@pytest.mark.parametrize("introducing", [True, False])
def test_wait_asks_again_with_fresh_masks_after_a_restart(phase, introducing, silos, tmp_path):
    """A site that is killed after a phase has lost its keys; all are asked again, and the result is the same."""
    keys = make_keys(silos.names)
    sites = [make_site(silos, i, tmp_path, keys) for i in range(4)]

    class Restarting(LocalSites):
        done = False

        def push(self, orders):
            made = super().push(orders)
            order = order_of(wire.decode(next(iter(orders.values()))))
            due = (order.shape is None and phase != "sum") or order.round == 1 or order.secure.phase == "sum"
            if not self.done and order.secure.phase == phase and due and introducing == (self.rounds == 0):
                self.done = True
                self.sites[silos.names[1]] = make_site(silos, 1, tmp_path, keys)
            return made

        @property
        def rounds(self):
            return sum(order_of(c).train for _, c, _ in self.log)

    grid = Restarting(sites)
    _, run = federate(grid, TEXT, WAIT)
    problem = fc.Problem(silos, loss="logistic")
    want = simulate(problem, method("Scaffold"), rounds=3, stationarity_step=0.1, backend="loop")
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    if introducing or phase == "sum":
        assert grid.done


def test_an_answer_that_is_lost_is_given_again_as_it_was(silos, tmp_path):
    sites = secure_sites(silos, tmp_path)
    grid = LocalSites(sites)
    federate(grid, TEXT, WAIT)
    _, content, answer = [one for one in grid.log if one[0] == "a"][-1]
    assert wire.encode(sites[0].answer(content)) == wire.encode(answer)


# -- forged orders ----------------------------------------------------------------------------------------------------


def refusal(answer):
    return wire.text(answer, "refusal") if wire.kind(answer) == "refusal" else ""


class Forging(LocalSites):
    """A coordinator that changes orders; ``forge(order) -> fields of its secure part or None`` for each site."""

    def __init__(self, sites, forge):
        super().__init__(sites)
        self.forge = forge

    def push(self, orders):
        sent = dict(orders)
        for site, payload in orders.items():
            content = wire.decode(payload)
            if (fields := self.forge(order_of(content))) is not None:
                sent[site] = wire.encode(changed(content, secure=fields))
        return super().push(sent)


def test_keys_of_the_coordinators_own_are_refused(silos, tmp_path):
    """The coordinator sits between two sites: keys that the site named has not signed, or signed for something else."""

    def forge(order):
        if order.secure.phase != "shares" or order.site != "a":
            return None
        keys = list(order.secure.keys)
        keys[1] = keys[1].model_copy(update={"mask": masking.public(masking.X25519PrivateKey.generate())})
        return {"keys": keys}

    with pytest.raises(FederationError, match="a: refuses: the keys for masks of b are not signed by it"):
        federate(Forging(secure_sites(silos, tmp_path / "1"), forge), TEXT, WAIT)

    def own(order):
        if order.secure.phase != "shares" or order.site != "a":
            return None
        return {
            "keys": [
                k if k.site != "a" else order.secure.keys[1].model_copy(update={"site": "a"}) for k in order.secure.keys
            ]
        }

    with pytest.raises(FederationError, match="the keys that are said to be this site's are not"):
        federate(Forging(secure_sites(silos, tmp_path / "2"), own), TEXT, WAIT)

    seen = []

    def replayed(order):
        """Keys that b signed for another epoch."""
        if order.secure.phase != "shares":
            return None
        seen.append(order.secure.keys)
        return {"keys": [seen[0][i] if k.site == "b" else k for i, k in enumerate(order.secure.keys)]} if (
            order.site == "a" and seen[0] != order.secure.keys
        ) else None  # fmt: skip

    sites = secure_sites(silos, tmp_path / "3")
    federate(Forging(sites, replayed), TEXT, WAIT)
    with pytest.raises(FederationError, match="the keys for masks of b are not signed by it"):
        federate(Forging(sites, replayed), TEXT, WAIT, job="another")


def test_a_stranger_or_too_few_parties_are_refused(silos, tmp_path):
    keys = make_keys([*silos.names, "eve"])
    sites = [
        make_site(silos, i, tmp_path / "1", {k: v for k, v in keys.items() if k != "d" or i == 3}) for i in range(4)
    ]
    with pytest.raises(FederationError, match="the public key of d is not among its peers"):
        federate(LocalSites(sites), TEXT, WAIT)
    two = Silos.from_arrays([silos[0], silos[1]], names=["a", "b"])
    with pytest.raises(FederationError, match="a sum of 2 parties is below this site's min_parties = 3"):
        federate(LocalSites(secure_sites(two, tmp_path / "2")), TEXT, WAIT)
    log = []
    with pytest.raises(FederationError, match="0 site"):
        federate(LocalSites(secure_sites(silos, tmp_path / "3")), TEXT, SKIP, log=log)
    assert sum("over all parties or none" in line for line in log) == 4


def test_a_site_that_requires_secure_sums_refuses_others(silos, tmp_path):
    sites = secure_sites(silos, tmp_path, opened(secure="required"))
    with pytest.raises(FederationError, match=r"secure = .required.*--secure"):
        federate(LocalSites(sites), TEXT)
    assert not (tmp_path / "site0" / "ledger.json").exists()  # nothing was asked of the data
    federate(LocalSites(sites), TEXT, WAIT)


def after(silos, folder, settings=WAIT, **limits):
    """Sites after a run, and the orders of its last sum, by site."""
    sites = {s.name: s for s in secure_sites(silos, folder, opened(**limits))}
    grid = LocalSites(list(sites.values()))
    federate(grid, TEXT, settings)
    last = {s: c for s, c, _ in grid.log if order_of(c).secure.phase == "sum"}
    return sites, last, grid


def test_one_content_and_one_set_of_parties_per_round(silos, tmp_path):
    """Under the same masks nothing else is answered; under fresh ones the same content of the same parties only."""
    sites, last, grid = after(silos, tmp_path)
    vectors = wire.deserialise(last["a"]["vectors"])
    moved = wire.content(
        order=wire.text(last["a"], "order"),
        vectors={k: v + 1e-9 if v.is_floating_point() else v for k, v in vectors.items()},
    )
    used = "masks of this round were used for another answer"
    assert used in refusal(sites["a"].answer(moved))
    for fields in ({"last": 0}, {"position": 1, "cohort": 2}):
        assert used in refusal(sites["a"].answer(changed(last["a"], **fields)))
    assert "do not fit together" in refusal(sites["a"].answer(changed(last["a"], client=3)))
    assert refusal(sites["a"].answer(changed(last["a"], secure={"parties": ["a", "b", "c"]})))
    # fresh keys, for fewer parties or for another model
    fresh = fresh_epoch(sites, last["a"], ["a", "b", "c", "d"])
    assert "one model" in refusal(sites["a"].answer(changed(moved, secure={"epoch": fresh})))
    permuted = order_of(last["a"]).shape.model_copy(update={"sites": ["b", "a", "c", "d"]})
    swapped = changed(last["a"], client=1, shape=permuted, secure={"epoch": fresh})
    assert "its shape is not the one" in refusal(sites["a"].answer(swapped))
    again = sites["a"].answer(changed(last["a"], secure={"epoch": fresh}))
    assert wire.kind(again) == "report"
    old = next(answer for s, c, answer in grid.log if s == "a" and c is last["a"])
    words = [wire.deserialise(x["vectors"])["evaluate.words"] for x in (again, old)]
    assert not (words[0] == words[1]).any()
    fewer = fresh_epoch(sites, last["a"], ["a", "b", "c"])
    with_fewer = {"epoch": fewer, "parties": ["a", "b", "c"]}
    assert "began with other parties" in refusal(sites["a"].answer(changed(last["a"], secure=with_fewer)))


def fresh_epoch(sites, content, names, recover=False, name="f" * 31):
    """What an honest or dishonest coordinator does before a sum."""
    epoch = name + str(len(names))
    ask = {"phase": "keys", "epoch": epoch, "parties": names, "recover": recover}
    keys = [wire.text(sites[n].answer(changed(content, site=n, secure=ask)), "secure") for n in names]
    read = [Key.read(k) for k in keys]
    share = {"phase": "shares", "epoch": epoch, "keys": read, "recover": recover}
    boxes = {n: json.loads(wire.text(sites[n].answer(changed(content, site=n, secure=share)), "secure")) for n in names}
    assert bundle(read)
    return (epoch, boxes) if recover else epoch


def test_changing_parties_from_round_to_round_are_refused_unless_allowed(silos, tmp_path):
    """Participation in part: the sums of two rounds would be over different sites."""
    text = write(method("Scaffold"), rounds=3, participation=0.75)
    with pytest.raises(FederationError, match="always over the same parties"):
        federate(LocalSites(secure_sites(silos, tmp_path / "1")), text, WAIT)
    federate(LocalSites(secure_sites(silos, tmp_path / "2", opened(changing_cohorts=True))), text, WAIT)


def test_what_changing_cohorts_gives_away(silos, tmp_path):
    """The attack that the default is made against: two sums at models that hardly differ, one of them without a."""
    grid = Dropping(secure_sites(silos, tmp_path, opened(changing_cohorts=True)), "a", "keys")
    one = Coordinator(grid, list(silos.names), grid.permitted, parse(TEXT), "job", SKIP)
    one.prepare()
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    four, three = (
        one.transport.exchange(Round(r, one.rounds.buffers, None, None, x + r * 1e-10)).measured().gradient
        for r in range(2)
    )
    alone_there = fc.Problem(alone(silos, 0), loss="logistic").smooth().evaluate(x).gradient
    torch.testing.assert_close(4 * four - 3 * three, alone_there, rtol=0, atol=1e-8)


def test_no_site_gives_both_shares_of_another(silos, tmp_path):
    """Once a sum was opened for some survivors, no other list of survivors is answered."""
    sites, _, grid = after(silos, tmp_path, SKIP, changing_cohorts=True)
    opened_with = [
        c for s, c, _ in grid.log if s == "a" and order_of(c).secure.phase == "open" and order_of(c).round == 2
    ]
    (content,) = opened_with
    first = json.loads(wire.text(sites["a"].answer(content), "secure"))
    assert set(first["own"]) == {"a", "b", "c", "d"}
    assert not first["gone"]
    without = changed(content, secure={"survivors": ["a", "b", "c"]})
    assert "a second opening of the same sum" in refusal(sites["a"].answer(without))


@pytest.mark.parametrize(
    "survivors", [["a"], ["a", "b"], ["b", "c", "d"], ["a", "a", "b"], ["c", "b", "a"], ["a", "b", "eve"]]
)
def test_openings_that_say_too_much_are_refused(survivors, silos, tmp_path):
    sites = {s.name: s for s in secure_sites(silos, tmp_path, opened(changing_cohorts=True))}
    said = []

    class Asking(LocalSites):
        def push(self, orders):
            for site, payload in orders.items():
                content = wire.decode(payload)
                order = order_of(content)
                if order.secure.phase == "open" and site == "a" and order.round == 1:
                    said.append(refusal(sites["a"].answer(changed(content, secure={"survivors": survivors}))))
            return super().push(orders)

    federate(Asking(list(sites.values())), TEXT, SKIP)
    assert said
    assert all(said)


@pytest.mark.parametrize("kind", ["own", "box"])
def test_a_false_share_voids_the_round(kind, silos, tmp_path):
    """A site that gives a wrong share, or a box that was changed on the way, does not lead to a wrong sum."""

    def meddle(site, content, answer):
        order = order_of(content)
        if site == "b" and order.round == 1 and order.secure.phase == "open" and kind == "own":
            told = json.loads(wire.text(answer, "secure"))
            told["own"]["a"] = "00" * 66
            return wire.content(secure=json.dumps(told))
        if (
            site == "b"
            and order.round == 1
            and order.secure.phase == "shares"
            and kind == "box"
            and order.secure.recover
        ):
            told = json.loads(wire.text(answer, "secure"))
            told["a"] = told["c"]
            return wire.content(secure=json.dumps(told))
        return answer

    sites, log = secure_sites(silos, tmp_path, opened(changing_cohorts=True)), []
    if kind == "own":
        with pytest.raises(FederationError, match=r"cannot be opened.*the round is void"):
            federate(LocalSites(sites, meddle), TEXT, SKIP)
        return
    _, run = federate(LocalSites(sites, meddle), TEXT, SKIP, log=log)  # a leaves the round, the others go on
    assert any("the shares that are said to be from b are not" in line for line in log)
    assert math.isfinite(run.history[-1]["objective"])


def test_masks_that_do_not_cancel_are_noticed(silos, tmp_path):
    """A site whose words are of another round: the sum is thrown away."""
    first = {}

    def meddle(site, content, answer):
        order = order_of(content)
        if site == "b" and order.train:
            return wire.content(
                report={"round": order.round},
                vectors=wire.deserialise(first.setdefault("b", answer)["vectors"]),
            )
        return answer

    with pytest.raises(FederationError, match="masks of a secure sum do not cancel"):
        federate(LocalSites(secure_sites(silos, tmp_path), meddle), TEXT, WAIT)


def test_numbers_beyond_the_range_are_found_in_the_sum(silos, tmp_path):
    """Least squares on huge features: the sum says so; a site that did would tell of itself alone."""
    huge = Silos.from_arrays([(silos[i][0] * 1e6, silos[i][1]) for i in range(4)], names=silos.names)
    text = tomli_w.dumps({"problem": {"loss": "least_squares"}}) + write(method("Scaffold"))
    with pytest.raises(FederationError, match="4 sites are together beyond the range of a secure sum"):
        federate(LocalSites(secure_sites(huge, tmp_path)), text, WAIT)


def test_a_lie_within_the_range_is_not_seen(silos, tmp_path):
    """What is lost: a site that adds 1 to every entry of its reply moves the mean by a quarter, and nobody knows."""

    def meddle(site, content, answer):
        if site != "b" or not order_of(content).train:
            return answer
        vectors = wire.deserialise(answer["vectors"])
        vectors["train.words"] += 1 << masking.BITS
        return wire.content(report=wire.numbers(answer), vectors=vectors)

    _, honest = federate(LocalSites(secure_sites(silos, tmp_path / "1")), TEXT, WAIT)
    _, bent = federate(LocalSites(secure_sites(silos, tmp_path / "2"), meddle), TEXT, WAIT)
    assert (honest.solution - bent.solution).abs().max() > 0.1


@pytest.mark.parametrize("settings", [WAIT, SKIP], ids=["wait", "skip"])
def test_keys_of_masks_are_in_no_file(settings, silos, tmp_path, monkeypatch):
    """So nobody who takes a site's folder later opens traffic that was recorded."""
    made, generate = [], masking.X25519PrivateKey.generate
    token = secrets.token_bytes

    class Noting:
        @staticmethod
        def generate():
            made.append(generate().private_bytes_raw())
            return masking.X25519PrivateKey.from_private_bytes(made[-1])

    def noting(size):
        made.append(token(size))
        return made[-1]

    monkeypatch.setattr(keys, "X25519PrivateKey", Noting)
    monkeypatch.setattr(keys.secrets, "token_bytes", noting)
    federate(LocalSites(secure_sites(silos, tmp_path, opened(changing_cohorts=True))), TEXT, settings)
    written = b"".join(p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file() and p.name != "secret")
    assert len(made) >= 12
    assert not [key for key in made if key in written or key.hex().encode() in written]
