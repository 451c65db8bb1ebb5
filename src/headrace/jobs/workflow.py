"""`Workflow`: a task whose handler is replayed, so that it survives crashes between its steps.

    @app.workflow("checkout", version=2)
    async def checkout(ctx: WorkflowContext, order_id: int) -> str: ...

    @checkout.older(1)
    async def checkout_1(ctx: WorkflowContext, order_id: int) -> str: ...

Its queue is `workflow.checkout`. A job keeps the version that it was enqueued with and is run only
by code of that version. A run ends done, failed, or parked: then the job waits in its queue until
the wait ends, and the next run replays the recorded steps.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, Unpack

from headrace.jobs.errors import InvalidStep, InvalidTask, Nondeterministic, VersionMissing
from headrace.jobs.job_context import current_job
from headrace.jobs.messages import Outcome
from headrace.jobs.model import VERSION_LAST
from headrace.jobs.outcomes import Fail
from headrace.jobs.tasks.options import WORKFLOW_PREFIX, TaskOptions, require_within
from headrace.jobs.tasks.payloads import Payloads, is_async
from headrace.jobs.tasks.task import Task
from headrace.jobs.workflow_context import (
    BlockingWorkflowContext,
    Parked,
    StepFailed,
    StepStore,
    WorkflowContext,
    refusal,
)

RESULT_KEPT: Final = "7d"
H = TypeVar("H", bound=Callable[..., Any])


class Workflow(Task):
    """A workflow with its code per version. `Registry.workflow` connects it to an app."""

    def __init__(
        self, name: str, handler: Callable[..., Any], **options: Unpack[TaskOptions]
    ) -> None:
        if options.get("batch") is not None or options.get("upgrade"):
            raise InvalidTask(
                f"workflow {name!r}: takes neither batch nor upgrade: a job is one workflow, and"
                " runs with the version that it began with"
            )
        options.setdefault("keep_result", RESULT_KEPT)
        super().__init__(
            queue=WORKFLOW_PREFIX + str(name), handler=_without_context(name, handler), **options
        )
        self.name = name
        self.is_async = is_async(handler)
        self.handler = self._run if self.is_async else self._run_blocking
        self._codes = {self.version: handler}
        self._payloads = {self.version: self.payloads}

    def older(self, version: int) -> Callable[[H], H]:
        """Decorate the code of an older version, for workflows that began with it.

        Raises: InvalidTask.
        """

        def declare(handler: H) -> H:
            require_within(self.queue, "version", version, (1, VERSION_LAST))
            payloads = Payloads(
                self.queue, _without_context(self.name, handler), given=None, is_batch=False
            )
            if version in self._codes or version > self.version:
                raise InvalidTask(
                    f"workflow {self.name!r}: version {version} is not an older one without code:"
                    f" the newest is {self.version}, and {sorted(self._codes)} have code"
                )
            if payloads.takes_fields != self.takes_fields or is_async(handler) != self.is_async:
                raise InvalidTask(
                    f"workflow {self.name!r}: version {version} differs in kind: let all its"
                    " versions be async or not, and take fields or one payload"
                )
            self._codes[version] = handler
            self._payloads[version] = payloads
            return handler

        return declare

    def decode(self, payload: bytes, version: int | None = None) -> Any:
        """Decode a payload for the code of its version. Raises: ValueError, VersionMissing."""
        found = self._payloads.get(self.version if version is None else version)
        if found is None:
            raise VersionMissing(self.name, version or 0, sorted(self._codes))
        return found.decode(payload)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the newest handler directly, with a context of your own."""
        return self._codes[self.version](*arguments, **named)

    async def _begin(self) -> WorkflowContext:
        """A context with the recorded steps. Raises: LeaseLost, Cancel."""
        job = current_job()
        store: StepStore = self.service().workflows
        state, recorded = await store.begin(job)
        if state != "held":
            raise refusal(job, state)
        return WorkflowContext(job, store, recorded, retries=self.retries)

    async def _run(self, *payload: Any, **fields: Any) -> Any:
        """Run an async handler until it ends or has to wait."""
        context = await self._begin()
        code = self._codes[context.version]
        running = asyncio.ensure_future(code(context, *payload, **fields))
        try:
            await asyncio.wait((running, context.parked), return_when=asyncio.FIRST_COMPLETED)
            is_parked = not running.done()
        finally:
            context.end()
            await _cancelled({running, *context.tasks})
            if not running.cancelled():
                # An error that is not raised here, such as that of a cancelled handler, is known.
                running.exception()
        if is_parked:
            context.job.snooze(context.parked.result())
            return None
        return await self._ended(context, running.result)

    def _run_blocking(self, *payload: Any, **fields: Any) -> Any:
        """Run a plain handler in its thread until it ends or has to wait."""
        assert self.bridge is not None, "a running workflow belongs to an app"
        bridge = self.bridge()
        context = bridge.run(self._begin())
        code = self._codes[context.version]
        try:
            value = code(BlockingWorkflowContext(context, bridge), *payload, **fields)
        except Parked as parked:
            context.job.snooze(parked.wait_s)
            return None
        except Exception as error:  # noqa: BLE001 - raised again by _ended
            return bridge.run(self._ended(context, _raising(error)))
        return bridge.run(self._ended(context, lambda: value))

    async def _ended(self, context: WorkflowContext, result: Callable[[], Any]) -> Any:
        """The handler's result, or its error as an outcome of the job."""
        try:
            context.require_unbroken()
            value = result()
            _require_awaited(context)
            context.replay.require_all()
        except Nondeterministic as error:
            context.job.outcome = Outcome("quarantined", None, error.text)
            return None
        except InvalidStep as error:
            raise Fail(error.text) from error
        except StepFailed as error:
            await context.mark_uncaught(error.number)
            raise
        return value


def _require_awaited(context: WorkflowContext) -> None:
    """Refuse the end of a handler that did not await one of its calls. Raises: InvalidStep."""
    forgotten = [one for one in context.made if inspect.getcoroutinestate(one) == "CORO_CREATED"]
    for one in forgotten:
        one.close()
    if forgotten:
        name = getattr(forgotten[0], "__name__", "step")
        raise InvalidStep(
            f"a call of ctx.{name} was not awaited and did nothing: write `await ctx.{name}(...)`"
        )


def _raising(error: Exception) -> Callable[[], Any]:
    def result() -> Any:
        raise error

    return result


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks other than this one and wait for their end."""
    others = {task for task in tasks if not task.done() and task is not asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


def _without_context(name: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the parameters of `handler` after its context. Raises: InvalidTask."""
    if not inspect.isfunction(handler):
        raise InvalidTask(f"workflow {name!r}: expected a function, got {handler!r}")
    signature = inspect.signature(handler)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind > inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise InvalidTask(
            f"workflow {name!r}: its handler takes the context first:"
            f" `async def {handler.__name__}(ctx, ...)`"
        )

    def fields() -> None: ...

    fields.__signature__ = signature.replace(parameters=parameters[1:])  # type: ignore[attr-defined]
    fields.__annotations__ = {
        k: v for k, v in handler.__annotations__.items() if k != parameters[0].name
    }
    fields.__module__, fields.__name__ = handler.__module__, handler.__name__
    fields.__wrapped__ = handler  # type: ignore[attr-defined]
    return fields
