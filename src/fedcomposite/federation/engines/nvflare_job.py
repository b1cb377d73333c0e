"""What NVIDIA FLARE runs: the job that carries orders, at its server and at the sites.

Nothing of it travels: a job names these classes, which are installed with the package, and sites allow no others. In
the server's job process :class:`ServerRelay` connects to the run's socket; in a site's job process :class:`SiteRelay`
asks at the socket of ``federation join``. Neither can read or sign anything. :class:`JobGate` in a site's client asks
there which jobs may be deployed.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.app_deployer_spec import AppDeployerSpec
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReturnCode, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import buffer_list
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedcomposite.federation.engines import sockets
from fedcomposite.federation.engines.relaying import Relay

FEDERATION, SITE = "FEDCOMPOSITE_FEDERATION", "FEDCOMPOSITE_SITE"
"""Variables that name the folder of ``serve`` and of ``join`` to what FLARE starts."""
TOPIC = "fedcomposite"
_SESSION, _ORDER = 5.0, 86400.0  # seconds for an answer
_NEEDED = {
    "ClientStatusProcessor", "ScopeInfoProcessor", "CheckResourceProcessor", "CancelResourceProcessor",
    "ReportResourcesProcessor", "ReportVersionProcessor", "DeployProcessor", "StartJobProcessor", "AbortAppProcessor",
    "DeleteRunNumberProcessor", "NotifyJobStatusProcessor",
}  # fmt: skip
"""What a server has to ask of a client so that jobs begin and end."""
_JOB = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A job's name: FLARE's server makes it, and its client has a folder of that name beside those of its kit."""
_END = 30.0  # seconds in which a job's process has to end


def print_no_messages() -> None:
    """Have FLARE's processes not write every large message out as text, for a line of a log that nobody asked for.

    FLARE 2.9 formats what has arrived before it looks whether its log wants it: 0.6 s of processor time for 52 MB.
    """
    if (kept := getattr(buffer_list, "ConsumableBufferList", None)) is not None:
        kept.__repr__ = lambda self: f"{len(self)} pieces"


print_no_messages()


def relay_socket(state: Path, job: str) -> Path:
    """Where a run waits for the relays of its jobs."""
    return sockets.place(state / "relays", job)


def site_socket() -> Path:
    """Where the site's own process answers."""
    return sockets.place(Path(os.environ[SITE]) / "state" / "socket", sockets.SITE_SOCKET)


class ServerRelay(Controller):  # type: ignore[misc]
    """In the server's job process: carries orders between a run's socket and the sites of the job."""

    def __init__(self, job: str) -> None:
        super().__init__()
        if not re.fullmatch("[0-9a-z-]{1,64}", job):
            raise ValueError("not a job's name")
        self._job = job

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is prepared."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is left."""

    def process_result_of_unknown_task(self, *args: Any) -> None:
        """There are no tasks."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Relay until the run has ended or the job is aborted."""
        engine, path = fl_ctx.get_engine(), relay_socket(Path(os.environ[FEDERATION]) / "state", self._job)

        def ask(site: str, order: bytes | None) -> tuple[str, bytes | None] | None:
            request, limit = Shareable({} if order is None else {"order": order}), _SESSION if order is None else _ORDER
            got = engine.send_aux_request([site], TOPIC, request, limit, fl_ctx, optional=True).get(site)
            if got is None or got.get_return_code() != ReturnCode.OK:
                return None
            return got["session"], got.get("report")

        try:
            relay = Relay(path, sorted(c.name for c in engine.get_clients()), ask, fl_ctx.get_job_id())
        except OSError:
            self.log_info(fl_ctx, "the run that asked for this job is gone")
            return
        parent = os.getppid()
        relay.run(lambda: bool(abort_signal.triggered) or os.getppid() != parent)
        late = threading.Timer(_END, os._exit, (0,))  # FLARE waits for answers that nobody will give
        late.daemon = True
        late.start()


class SiteRelay(Executor):  # type: ignore[misc]
    """In a site's job process: asks at the socket of the site's own process."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Take orders from the start of the job."""
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(TOPIC, self._handle)

    def _handle(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            made = sockets.ask_site(site_socket(), *([request["order"]] if "order" in request else []))
        except OSError:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        return Shareable({"session": made.session, "report": made.report})

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """There are no tasks."""
        return make_reply(ReturnCode.TASK_UNKNOWN)


class _OfJobs(RequestProcessor):  # type: ignore[misc]
    """One of FLARE's own processors, for jobs that have the names that FLARE gives: folders of the kit have others."""

    def __init__(self, own: RequestProcessor) -> None:
        self._own = own

    def get_topics(self) -> list[str]:
        """What it listens for."""
        return list(self._own.get_topics())

    def process(self, req: Message, app_ctx: Any) -> Message:
        """What FLARE makes of a request, unless it is about no job."""
        job = req.get_header(RequestHeader.JOB_ID)
        return self._own.process(req, app_ctx) if job is None or _JOB.fullmatch(str(job)) else error_reply("no job")


class JobGate(AppDeployerSpec):  # type: ignore[misc]
    """In a site's client: has every job judged by the site's own process before it is deployed.

    It also takes away what FLARE's server could have the client do beside jobs. FLARE's client looks whether somebody
    may ask for it only where the server says that it should: without that word it prints any file to any server. And it
    deletes the folder of any job, one called "startup" or "local" among them.
    """

    def __init__(self) -> None:
        super().__init__()
        known = ClientRequestProcessors.request_processors  # what the client will listen for
        known[:] = [_OfJobs(one) for one in known if type(one).__name__ in _NEEDED]

    def deploy(
        self, workspace: Workspace, job_id: str, job_meta: dict[str, Any], app_name: str, app_data: bytes,
        fl_ctx: FLContext,
    ) -> str:  # fmt: skip
        """Why a job is refused, or what FLARE's own deployment says of it."""
        try:
            reason = sockets.show_job(site_socket(), app_data, str(job_meta.get("submitter_name", "")))
        except OSError:
            return "the site's own process does not answer"
        if reason:
            return f"refused by the site: {reason}"
        return str(fl_ctx.get_prop(SystemComponents.DEFAULT_APP_DEPLOYER).deploy(
            workspace=workspace, job_id=job_id, job_meta=job_meta, app_name=app_name, app_data=app_data, fl_ctx=fl_ctx,
        ) or "")  # fmt: skip
