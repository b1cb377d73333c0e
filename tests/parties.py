"""A coordinator and sites as real processes on loopback. Everything that is started is stopped."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
from nursery import NURSERY
from safetensors.torch import load_file

import fedcomposite as fc
from fedcomposite.federation.engines import selection
from fedcomposite.federation.folders import FederationFolder

SITES = ["north", "south", "west"]
PATIENCE = 300.0  # seconds after which a test gives up; none of them depends on how long something takes


def children(pid):
    """The processes below one, from the system's own table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


class Party:
    """One command of the federation as a process, its words in a file."""

    def __init__(self, log, *arguments, program=("fedcomposite", "federation"), variables=None):
        self.log = log
        self.began = log.stat().st_size if log.exists() else 0
        self.process = NURSERY.start(log, [*program, *arguments], variables)

    @property
    def alive(self):
        return self.process.poll() is None

    def said(self):
        return self.log.read_bytes()[self.began :].decode() if self.log.exists() else ""

    def wait_for(self, text):
        end = time.monotonic() + PATIENCE
        while text not in self.said():
            assert time.monotonic() < end, f"{self.log.stem} did not say {text!r}:\n{self.said()}"
            assert self.alive, f"{self.log.stem} ended:\n{self.said()}"
            time.sleep(0.05)

    def ends(self, code, patience=PATIENCE):
        assert self.process.wait(patience) == code, self.said()
        return self.said()

    def kill(self):
        """SIGKILL, together with what the party started."""
        for pid in [self.process.pid, *children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def leave(self):
        leave([self])


def leave(parties):
    """Ctrl-C at all of them, then a while to leave, then the end."""
    for party in parties:
        if party.alive:
            party.process.send_signal(signal.SIGINT)
    for party in parties:
        with contextlib.suppress(subprocess.TimeoutExpired):
            party.process.wait(15)
        party.kill()


class Parties:
    """A coordinator and three sites."""

    def __init__(self, folder, engine="nvflare"):
        self.folder, self.others, self.server, self.sites = folder, [], None, {}
        self.silos = fc.data.load("synthetic", clients=3, features=20, samples=1500, seed=3)
        self.disk = folder / "disk"
        self.disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(self.disk)]
        self.small = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, SITES, engine=engine)
        shutil.move(self.fed.path / "sites", folder / "sites")  # as they are carried to the sites
        for i, name in enumerate(SITES):
            X, y = self.silos[i]
            frame = pd.DataFrame(X.numpy(), columns=[f"f{j}" for j in range(20)]).assign(label=y.numpy())
            frame.to_csv(folder / f"{name}.csv", index=False)
            with (folder / "sites" / name / "site.toml").open("a") as file:
                file.write("reproducible_batches = true\nexact_counts = true\nmin_parties = 2\n")  # bits are compared

    def start(self, name, *arguments, **options):
        party = Party(self.folder / f"{name}.log", *arguments, **options)
        self.others.append(party)
        return party

    def serve(self, **variables):
        """A service in place of the one before, which is killed if it lives."""
        if self.server is not None:
            self.server.kill()
        self.server = Party(self.folder / "serve.log", "serve", self.fed.path, variables=variables)
        self.server.wait_for("serving on")

    def site(self, name, place=None):
        place = place or self.folder / "sites" / name
        return ["join", place, "--data", self.folder / f"{name}.csv", "--target", "label"]

    def join(self, name, place=None, held=None, **variables):
        """A site in place of the one before; ``held`` is where and in which round it is held."""
        if name in self.sites and self.server.alive:
            self.sites[name].leave()
        elif name in self.sites:
            self.sites[name].kill()  # it would try to say that it leaves
        go = self.folder / f"{name}.go"
        go.unlink(missing_ok=True)
        options = {} if held is None else {"program": ("held_site", *map(str, held), str(go))}
        options["variables"] = variables
        self.sites[name] = made = Party(self.folder / f"{name}.log", *self.site(name, place), **options)
        made.usual = place is None and held is None and not variables
        return made

    def release(self, name):
        (self.folder / f"{name}.go").touch()

    def run(self, out, *arguments):
        return self.start(out, "run", self.fed.path, *arguments)

    def revive(self):
        """Everybody is there as in the beginning, whatever became of them in a test."""
        for party in self.others:
            party.kill()
        self.others = []
        revoked = self.fed.revoked()
        for name in revoked:
            self.fed.reinstate(name)
        if self.server is None or not self.server.alive or selection.unreachable(self.fed):
            self.serve()
        elif revoked:
            selection.tell(self.fed)
        for name in SITES:
            if name not in self.sites or not self.sites[name].alive or not self.sites[name].usual:
                self.join(name)
        for site in self.sites.values():
            site.wait_for("waiting for work")

    def stop(self):
        leave([*self.others, *self.sites.values()])
        leave(list(filter(None, [self.server])))  # last, so that sites can say that they leave
        if self.small:
            subprocess.run(["umount", str(self.disk)], check=True)


@contextlib.contextmanager
def served(folder, files, limits):
    """A served federation of sites with a table each, which are waiting for work."""
    fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, list(files))
    parties = []
    try:
        parties.append(Party(folder / "serve.log", "serve", fed.path))
        parties[0].wait_for("serving on")
        for name, path in files.items():
            place = fed.path / "sites" / name / "site.toml"
            text = place.read_text().replace("[data]", f'[data]\nfile = "{path}"\nrecipe = true', 1)
            place.write_text(text.replace("[limits]", f"[limits]\n{limits}", 1))
            parties.append(Party(folder / f"{name}.log", "join", place.parent))
        for party in parties[1:]:
            party.wait_for("waiting for work")
        yield fed
    finally:
        leave(parties[1:])
        leave(parties[:1])


def model(out):
    return load_file(out / "model.safetensors")["x"]


def records(out):
    lines = (out / "history.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]
