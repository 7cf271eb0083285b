"""A Ray cluster: plain actors that open a thing once and apply it to one item after another.

The driver hands items out, keeps their order, and gives those of a worker that died to another.
Nothing is left to Ray Data, which reorders and resizes blocks, nor to Ray's own retries.
"""

import logging
import os
import secrets
import socket
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import tightlip
from tightlip.core.children import pickled
from tightlip.core.devices import kind_of_device, on_workers
from tightlip.core.engines import EngineSettings, Item, Result, settled
from tightlip.core.errors import FullDiskError, LostWorkersError, TightlipError, UsageError
from tightlip.core.progress import log

_MOST_DEATHS = 3  # of workers at one item, or before their first
_FORGOTTEN = -1  # the number of an item whose result nobody waits for
_SLOW_SECONDS = 30.0  # that the first workers wait for the others, to be of one kind
_ANSWER_SECONDS = 5.0  # in which the machine of a cluster's head must answer
_START_SECONDS = 600.0  # in which a cluster without any worker must have made room for one


class RayEngine:
    """Workers of one cluster, each with `threads` CPUs, or with a GPU where the device is one.

    Holds:
        in_order: results come in the items' order, whoever made them.
        redone: what a dead worker or node had in hand is done by another.
        one_kind: devices and builds are all the same, unless mixed ones were asked for.
    """

    is_remote = True

    def __init__(self, settings: EngineSettings, device: str) -> None:
        import ray
        import torch

        self._ray, self._mixed = ray, settings.mixed
        self.threads = settings.threads_per_worker or torch.get_num_threads()
        self.notes: list[str] = []
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.num_machines = len(machines)
        has_gpu = any(machine.get("GPU", 0) >= 1 for machine in machines)
        self.device = _device(device, has_gpu)
        # With a GPU the threads have next to nothing to do, and must not keep other GPUs idle.
        self._needs = {"CPU": 1, "GPU": 1} if self.device == "cuda" else {"CPU": self.threads}
        room = [min(int(m.get(k, 0) // n) for k, n in self._needs.items()) for m in machines]
        if not sum(room):
            needed = " and ".join(f"{number} {kind}" for kind, number in self._needs.items())
            raise UsageError(
                f"A worker takes {needed}, and no machine of the cluster has as much. Give fewer --threads-per-worker, or add "
                "machines."
            )
        self.num_workers = min(settings.workers or sum(room), sum(room))
        self.workers = min(max(room), self.num_workers)  # that share a machine's memory
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # what each is asked first, and the worker
        self._busy: dict[Any, tuple[Any, int]] = {}  # tasks, their workers and items' numbers
        self._kinds: dict[Any, str] = {}  # of all that have started
        self._nodes: dict[Any, str] = {}
        self._num_stillborn = 0

    @classmethod
    @contextmanager
    def opened(cls, settings: EngineSettings, device: str) -> Iterator["RayEngine"]:
        """Joins a cluster, or starts one of this machine alone, which ends with it."""
        with _joined(settings.address):
            engine = cls(settings, device)
            token = on_workers.set(True)
            try:
                yield engine
            finally:
                on_workers.reset(token)
                engine._dismiss([*engine._kinds, *engine._starting.values()])

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        return self.scatter(lambda: function, items)

    @property
    def num_python(self) -> int:
        return self.num_workers

    def map_python(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        if pickled(function) is None:
            return ((item, function(item)) for item in items)
        return self.map(function, items)

    def kinds(self, device: str) -> list[str]:
        is_first = not self._kinds
        self.start()
        while self._starting and is_first:
            seconds = _SLOW_SECONDS if self._kinds else _START_SECONDS
            done, _ = self._ray.wait([*self._starting], timeout=seconds)
            if not done and not self._kinds:
                raise _no_room()
            if not done:  # it is looked at when it comes
                break
            self._take_in(done[0])
        return sorted({*self._kinds.values()})

    def scatter(
        self, opening: Callable[[], Callable[[Item], Any]], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        # In a list Ray hands the reference itself on: a worker that cannot read it says why.
        given = [self._ray.put(opening)]
        source, again = enumerate(items), deque[int]()
        waiting: dict[int, Item] = {}
        results: dict[int, Result] = {}
        deaths: Counter[int] = Counter()
        first, is_over = 0, False
        try:
            while True:
                # Results wait for those before them: no more than a few may.
                may_draw = len(waiting) < 2 * self.num_workers and (self._idle or not waiting)
                if may_draw and not again and not is_over:
                    drawn = dict(islice(source, 1))
                    waiting |= drawn
                    again.extend(drawn)
                    is_over = not drawn
                if again and self._idle:
                    number, worker = again.popleft(), self._idle.pop()
                    self._busy[worker.apply.remote(given, waiting[number])] = worker, number
                    continue
                while first in results:
                    yield waiting.pop(first), results.pop(first)
                    first += 1
                if is_over and not waiting:
                    return
                if again or self._busy:
                    self.start()
                    self._settle(self._one_done(), results, again, deaths)
        finally:  # whoever asked may have had enough
            self._busy = {task: (worker, _FORGOTTEN) for task, (worker, _) in self._busy.items()}

    def start(self) -> None:
        """Ask for as many workers as there are to be, and wait for none."""
        missing = self.num_workers - len(self._kinds) - len(self._starting)
        cpus, gpus = self._needs["CPU"], self._needs.get("GPU", 0)
        for _ in range(missing):
            plain: Any = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_Worker)
            worker = plain.remote(os.getcwd(), tightlip.__version__)
            self._starting[worker.kind.remote(self.device)] = worker

    def _one_done(self) -> Any:
        """A task that has ended, of those under way; a refusal where no worker finds room."""
        while True:
            tasks = [*self._busy, *self._starting]
            done, _ = self._ray.wait(tasks, num_returns=1, timeout=_START_SECONDS)
            if done:
                return done[0]
            if not self._busy and not self._idle:
                raise _no_room()

    def _settle(
        self, task: Any, results: dict[int, Any], again: deque[int], deaths: Counter[int]
    ) -> None:
        """Take a result in, or give its item to another worker."""
        if task in self._starting:
            self._take_in(task)
            return
        worker, number = self._busy.pop(task)
        try:
            result = self._result(task)
        except FullDiskError as error:
            # Of one machine, it may be, and others have room.
            log.warning("A worker has no room and is sent home: %s", error)
            self._dismiss([worker])
            self.num_workers -= 1
            if not self.num_workers:
                raise
            again.extendleft([number] if number != _FORGOTTEN else [])
        except self._ray.exceptions.RayError as error:  # the worker is lost, or what it made
            node = self._nodes[worker]
            alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
            with_it = [other for other in self._kinds if self._nodes[other] == node]
            lost = [number, *self._dismiss([worker] if node in alive else with_it)]
            deaths[number] += node in alive  # of a machine that is gone the shard is innocent
            if deaths[number] >= _MOST_DEATHS:
                raise _died(error, "the same shard") from None
            log.warning("A worker died, and its shard is done again.")
            again.extendleft(each for each in lost if each != _FORGOTTEN)
        except Exception:
            self._idle.append(worker)
            if number != _FORGOTTEN:
                raise
        else:
            self._idle.append(worker)
            results |= {} if number == _FORGOTTEN else {number: result}

    def _take_in(self, task: Any) -> None:
        """A worker that says what it is; refused where it is of another kind than the others."""
        worker = self._starting.pop(task)
        try:
            kind, self._nodes[worker] = self._result(task)
        except self._ray.exceptions.RayError as error:
            self._num_stillborn += 1
            if self._num_stillborn >= _MOST_DEATHS:
                raise _died(error, "its start") from None
            self.start()
            return
        except UsageError as error:  # of one that comes late, when others may have worked for hours
            raise (LostWorkersError if self._nodes else UsageError)(error.args[0]) from error
        self._kinds[worker], self._num_stillborn = kind, 0
        self._idle.append(worker)
        if len(kinds := sorted({*self._kinds.values()})) > 1 and not self._mixed:
            raise LostWorkersError(
                f"The machines of the cluster differ: {'; '.join(kinds)}. What they scan may differ in its last digits. Use "
                "machines of one kind, or give --mixed, and the report says so."
            )

    def _result(self, task: Any) -> Any:
        """What a worker says, or what it raises, as if it had been raised here."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, errors.RaySystemError | ImportError):
                raise LostWorkersError(
                    f"A worker cannot read what it was given ({str(cause).splitlines()[0]}). Every machine must have the same "
                    "tightlip, and model, corpus and report at the same paths."
                ) from error
            raise cause from (None if isinstance(cause, TightlipError) else error)

    def _dismiss(self, workers: Iterable[Any]) -> list[int]:
        """Send them home; what they were at is for others to do."""
        gone = [*workers]
        left = [number for worker, number in self._busy.values() if worker in gone]
        for worker in gone:
            self._ray.kill(worker)
            self._kinds.pop(worker, None)
        self._idle = [worker for worker in self._idle if worker not in gone]
        self._busy = {task: one for task, one in self._busy.items() if one[0] not in gone}
        self._starting = {task: one for task, one in self._starting.items() if one not in gone}
        return left


def _no_room() -> UsageError:
    return LostWorkersError(
        f"No worker found room in the cluster for {_START_SECONDS:.0f} seconds. Free some of it, or give fewer "
        "--threads-per-worker."
    )


def _died(error: Exception, when: str) -> UsageError:
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    return LostWorkersError(
        f"{_MOST_DEATHS} workers died at {when}, most likely for want of memory ({'; '.join(told[:2])}). Give a smaller "
        "--batch-tokens, --memory or number of --workers, and the same command again."
    )


def _device(name: str, has_gpu: bool) -> str:
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not has_gpu):
        raise UsageError(
            f"device={name!r} cannot be used on this cluster, which has {'' if has_gpu else 'no '}GPUs. Use "
            f"{'cpu, cuda' if has_gpu else 'cpu'} or auto."
        )
    return name


@contextmanager
def _joined(address: str | None) -> Iterator[None]:
    """A connection to the cluster, quiet; one that stood before stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told about an audit
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--engine ray needs Ray, which is not installed here. Install it: pip install 'tightlip[ray]'"
        ) from error
    with ExitStack() as stack:
        try:
            if not ray.is_initialized():
                how = _of_this_machine() if address is None else _of_others(address)
                given = stack.enter_context(how)
                stack.enter_context(_told_by_the_engine_alone())
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **given)
                stack.callback(ray.shutdown)
            elif address not in (None, "auto"):
                stands = ray.get_runtime_context().gcs_address
                if ray._private.services.canonicalize_bootstrap_address(address) != stands:
                    raise ValueError(f"this process has joined {stands}; ray.shutdown() leaves it")
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, ray.exceptions.AuthenticationError):
                reason = "authentication: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must give its token"
            raise UsageError(
                f"The Ray cluster at {address or 'this machine'} cannot be joined ({reason}). See docs/clusters.md for how to start "
                "one, and give its --address HOST:PORT."
            ) from error
        yield


@contextmanager
def _of_others(address: str) -> Iterator[dict[str, Any]]:
    """How a running cluster is joined: with a token where there is one, as Ray does for "auto" only."""
    from ray import _raylet
    from ray._private import services

    core: Any = _raylet
    if (place := services.canonicalize_bootstrap_address(address)) is None:
        raise ValueError("not the address of a cluster that runs")
    # Where nobody answers Ray itself would try for minutes.
    socket.create_connection(services.extract_ip_port(place), timeout=_ANSWER_SECONDS).close()
    has_token = core.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    mode = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")} if has_token else {}
    with _environment(mode):
        core.GcsClient(address=place)  # where the token is wrong it says so, and at once
        yield {"address": place}


@contextmanager
def _of_this_machine() -> Iterator[dict[str, Any]]:
    """How a cluster is started that nobody else can use, and whose files go with it."""
    from ray._private import ray_constants

    # Ray would keep the token of a cluster for all times, in a file that everybody may read.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # On Linux Ray takes 127.0.0.1 for the machine's own address, unless it is told this.
    is_cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    folders = tempfile.TemporaryDirectory(prefix="tl-", ignore_cleanup_errors=True)
    try:
        with folders as folder, _environment(token):
            how = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            yield how | {"_temp_dir": f"{folder}/ray"}  # inside, as Ray opens its own to everybody
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What Ray's core reads of the environment, and keeps until it is told to look again."""
    from ray import _raylet

    core: Any = _raylet
    before = {name: os.environ[name] for name in variables if name in os.environ}
    try:
        os.environ |= variables
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ |= before
        core.Config.initialize("")  # first, or a thread that still ends may miss the token
        core.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _told_by_the_engine_alone() -> Iterator[None]:
    """Ray prints to the terminal what becomes of workers; the engine says it in its own words."""
    from ray._private import worker

    before, worker.print_to_stdstream = worker.print_to_stdstream, lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


class _Worker:
    """What runs in a process of its own, on any machine of the cluster."""

    def __init__(self, folder: str, version: str) -> None:
        self._given, self._function = None, None
        if tightlip.__version__ != version:
            self._refusal: str | None = (
                f"{socket.gethostname()} has tightlip {tightlip.__version__}, and {version} is what the command was given to. "
                "Install the same on every machine."
            )
            return
        self._refusal = None
        try:
            os.chdir(folder)  # in which paths were given
        except OSError:
            self._refusal = (
                f"{socket.gethostname()} has no {folder}, where the command was given. Give it in a folder that every machine "
                "has at the same path."
            )

    def kind(self, device: str) -> tuple[str, str]:
        """What the worker is, and the node it runs on."""
        import ray

        if self._refusal is not None:
            raise UsageError(self._refusal)
        return kind_of_device(device), ray.get_runtime_context().get_node_id()

    def apply(self, given: list[Any], item: Any) -> Any:
        if self._given != given[0]:
            import ray

            self._given = self._function = None  # first, for the memory
            self._function = self._opened(ray.get(given[0]))
            self._given = given[0]
        assert self._function is not None
        return settled(self._function(item))

    def _opened(self, opening: Callable[[], Any]) -> Any:
        try:
            return opening()
        except FileNotFoundError as error:
            raise UsageError(
                f"{socket.gethostname()} does not see {error.filename}. Every machine must have model, corpus and report at the "
                "same paths: put them on a file system that all of them share."
            ) from error
        except UsageError as error:
            raise type(error)(f"On {socket.gethostname()}: {error.args[0]}") from error
