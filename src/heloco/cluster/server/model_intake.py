"""Receiving the model of an external run from the first machine that brings one."""

import contextlib
import shutil
from collections.abc import Callable

from torch import Tensor

from heloco.cluster.protocol.messages import ModelCommit, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.state import ServiceState
from heloco.cluster.server.transfers import SnapshotStore, Upload, refuse_for_disk
from heloco.disk import release_for
from heloco.errors import DiskError, RunStopped, UserError
from heloco.finite import all_finite
from heloco.outer.kernels.windows import parts
from heloco.records.run_files import MODEL_PARTIAL
from heloco.wire import blocks
from heloco.wire.layout import Layout

FREE_SPACE_SHARE = 0.5
"""A model may take this share of the free disk space if the config sets no limit."""
RunFactory = Callable[[Layout, dict[str, Tensor], list[str]], tuple[JournaledRun, SnapshotStore]]
"""Makes a run from a model: its layout, its tensors, and the names of its blocks in the machine's module."""


class ModelIntake:
    """One machine at a time sends its model. If it stalls, another machine may take over."""

    def __init__(
        self, state: ServiceState, create_run: RunFactory | None, serve: Callable[[JournaledRun, SnapshotStore], None]
    ) -> None:
        """`serve` is called with the run when it has its model."""
        self.state, self._create_run, self._serve = state, create_run, serve
        self._upload: Upload | None = None
        self._sender = ""
        self._last_growth: tuple[int, float] = (0, 0.0)
        """(bytes, time) of the upload when it last grew."""

    def upload(self, ticket: Ticket, layout: Layout) -> Upload:
        """The upload of this machine's model, new or continued."""
        state = self.state
        with state.lock:
            machine = state.machine(ticket).id
            state.check_open()
            if state.run is not None:
                raise Refused(RefusalCode.HAS_MODEL, "The run has its model.")
            self._check(layout)
            if self._upload is not None and self._upload.is_sealed:
                raise Refused(RefusalCode.BUSY, "The run is being started from a model that has arrived.")
            if self._upload is not None and (self._sender, self._upload.layout) != (machine, layout):
                if self._sender != machine and self._sender in state.roster.present and not self._is_idle():
                    raise Refused(RefusalCode.BUSY, "Another machine is sending the run its model.")
                self.drop()
            if self._upload is None:
                try:
                    self._upload, self._sender = Upload(state.folder / MODEL_PARTIAL, layout), machine
                except OSError as error:
                    raise refuse_for_disk(error, state.folder / MODEL_PARTIAL) from error
                self._last_growth = (0, state.now_s)
            return self._upload

    def _is_idle(self) -> bool:
        """Whether the sender has sent nothing for a while."""
        assert self._upload is not None
        cluster, now_s = self.state.config.cluster, self.state.now_s
        if self._upload.size != self._last_growth[0]:
            self._last_growth = (self._upload.size, now_s)
        return now_s - self._last_growth[1] > cluster.patience * cluster.beat_s

    def _check(self, layout: Layout) -> None:
        """Refuses an unsuitable model before any byte of it is sent."""
        if not blocks.is_numbered(layout.names):
            raise Refused(
                RefusalCode.LAYOUT, "A model's blocks are named parameter.0, …, buffer.0, …, and it has at least one parameter."
            )
        if (untrainable := layout.untrainable()) is not None:
            raise Refused(RefusalCode.LAYOUT, untrainable)
        limit = self.state.config.cluster.model_limit_gb * 1e9
        limit = limit or FREE_SPACE_SHARE * shutil.disk_usage(self.state.folder).free
        if layout.size > limit:
            size_text, limit_text = (f"{bytes_ / 1e9:.3g} GB" for bytes_ in (layout.size, limit))
            remedy = "raise model_limit_gb, or free some space there"
            raise Refused(RefusalCode.TOO_LARGE, f"The model has {size_text}, and this run takes at most {limit_text}: {remedy}.")

    def commit(self, ticket: Ticket, commit: ModelCommit) -> None:
        """Starts the run from the model that this machine has sent. The lock is free while the model is checked and written."""
        with contextlib.ExitStack() as until_it_is_served:
            with self.state.lock:
                if (upload := self._sent_by(ticket)) is None:
                    return
                until_it_is_served.enter_context(upload.sealed())
            is_intact = upload.digest() == commit.digest
            run_and_starts = self._make_run(upload, commit) if is_intact else None
            if run_and_starts is not None:
                self._serve_or_close(*run_and_starts)
                return
        upload.restart()
        if is_intact:
            raise Refused(RefusalCode.NOT_FINITE, "The model holds NaN or Inf.")
        raise Refused(RefusalCode.CORRUPTED, "What arrived is not what was sent (its digest differs): send it again.", size=0)

    def _sent_by(self, ticket: Ticket) -> Upload | None:
        """The whole model that this machine has sent; None if the run has its model. The caller holds the lock."""
        machine = self.state.machine(ticket).id
        if self.state.run is not None:
            return None
        self.state.check_open()
        upload = self._upload if self._sender == machine else None
        if upload is None or not upload.is_complete:
            raise Refused(RefusalCode.INCOMPLETE, "The model is incomplete: send the rest.", size=upload.size if upload else 0)
        return upload

    def _serve_or_close(self, run: JournaledRun, starts: SnapshotStore) -> None:
        """Serves the new run. If the run was stopped in the meantime, it is closed, and can be served again with its model."""
        with self.state.changed:
            self.drop()
            if self.state.ended is not None:
                run.close()
                self.state.check_open()
            self._serve(run, starts)

    def _make_run(self, upload: Upload, commit: ModelCommit) -> tuple[JournaledRun, SnapshotStore] | None:
        """The run, in its folder, with the model in its first checkpoint; None if the model holds NaN or Inf."""
        tensors = upload.tensors()
        parameters = blocks.blocks_of(blocks.PARAMETER, tensors)  # a buffer may be a mask of −∞
        if not all_finite(parts(parameters, release_for(upload.size))):
            return None
        assert self._create_run is not None
        try:
            return self._create_run(upload.layout, tensors, list(commit.names))
        except DiskError as error:
            raise Refused(RefusalCode.DISK, str(error)) from error
        except UserError as error:
            raise Refused(RefusalCode.MODEL, str(error)) from error
        except RunStopped as error:
            self.state.end("failed", str(error))
            raise Refused(RefusalCode.AWAY, f"The synchronizer has stopped: {error}") from error

    def drop(self) -> None:
        """Removes what was received of the model, so that another machine can send it."""
        if self._upload is not None:
            self._upload.close(remove=True)
        self._upload, self._sender = None, ""
