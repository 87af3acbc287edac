"""What the patch flow does to the outside world. Each function here is one effect: a phase calls it through
``claim.once``, and a repetition of any of them is harmless, which is what ``retry_safe=True`` says there.

Their arguments come from the row or from earlier effects, never from settings: they must be the same on every attempt.
"""

from __future__ import annotations

import shlex
from datetime import timedelta

from pydantic import ValidationError

from handlers.checkout import check_applies, checkout, commit, head, push
from handlers.github_api import github_api
from handlers.models import Draft, PatchSession, PullRequest, Questions, Story, StoryComment, Workflow, WorkflowState
from handlers.runner import CommandFailed, run
from handlers.settings import needed, settings
from handlers.shortcut_api import shortcut_api
from webhooks import Escalate

CLARIFIER_LIMIT = timedelta(minutes=5)
DRAFTER_LIMIT = timedelta(minutes=10)


async def read_story(sc_id: int) -> Story:
    async with shortcut_api() as shortcut:
        return await shortcut.story(sc_id)


async def find_questions(story: Story) -> Questions:
    """Ask the clarifier what a person has to say before anybody can draft; no clarifier, no questions."""
    command = settings().clarifier
    if command is None:
        return Questions()
    answer = await run(shlex.split(command), stdin=story.model_dump_json().encode(), timeout=CLARIFIER_LIMIT)
    try:
        return Questions.model_validate_json(answer.strip() or b"{}")
    except ValidationError as error:
        raise CommandFailed(f'the clarifier prints {{"questions": [...]}} or {{}}, not {answer[:200]!r}') from error


async def comment_once(sc_id: int, text: str, external_id: str) -> StoryComment:
    """Comment on the story, unless the comment with this mark is there already."""
    async with shortcut_api() as shortcut:
        for comment in await shortcut.comments(sc_id):
            if comment.external_id == external_id:
                return comment
        return await shortcut.comment(sc_id, text, external_id)


async def run_drafter(story: Story, question: str | None, answer: str | None) -> Draft:
    """Run the drafter in a fresh checkout and take a unified diff from its output.

    Raises:
        Escalate: no drafter is configured, or it had nothing to propose.
        CommandFailed: it failed, or its diff does not apply; another attempt may do better.
    """
    now = settings()
    command = shlex.split(needed(now.drafter, "PATCH_DRAFTER", "the command that drafts the patch"))
    told = story.model_copy(update={"question": question, "answer": answer}).model_dump_json().encode()
    async with checkout(now.base_branch) as directory:
        base_commit = await head(directory)
        diff = as_text(await run(command, stdin=told, cwd=directory, timeout=DRAFTER_LIMIT))
        if not diff.strip():
            raise Escalate(f"the drafter ({command[0]}) printed no diff: it had nothing to propose for this story")
        await check_applies(directory, diff, base_commit)
    return Draft(diff=diff, base_commit=base_commit)


def as_text(output: bytes) -> str:
    """A diff as a text column holds it, ending in the line end that git insists on."""
    try:
        text = output.decode()
    except UnicodeDecodeError as error:
        raise CommandFailed(f"the drafter's diff is not UTF-8: {error}") from error
    if "\0" in text:
        raise CommandFailed("the drafter's diff has NUL characters: print binary files with `git diff --binary`")
    return text if text.endswith("\n") else text + "\n"


async def push_patch(session: PatchSession) -> str:
    """Push the session's patch as its branch and return the commit's id, which is the same on every attempt."""
    if session.patch is None or session.base_commit is None:
        raise Escalate("the session has no patch: set `patch` and `base_commit`, or put it back to `clarified`")
    async with checkout(session.base_commit) as directory:
        sha = await commit(directory, session.patch, f"{session.title} [sc-{session.sc_id}]\n", session.opened_at)
        await push(directory, session.branch)
    return sha


async def find_or_open(session: PatchSession, sha: str) -> PullRequest:
    """Return the pull request of the session's branch, opening one if there is none.

    One that is closed counts when it is of this very commit: an earlier attempt opened it, and somebody was quick.
    """
    async with github_api() as github:
        found = await github.pull_requests(session.branch)
        for pull_request in found:
            if pull_request.state == "open" or pull_request.head.sha == sha:
                return pull_request
        return await github.open_pull_request(
            title=f"{session.title} [sc-{session.sc_id}]",
            body=proposal(session),
            branch=session.branch,
            base=settings().base_branch,
        )


def proposal(session: PatchSession) -> str:
    """The body of the pull request: where it comes from, and what was asked and answered."""
    parts = [f"Drafted for {session.story_url or f'sc-{session.sc_id}'}."]
    if session.question is not None and session.answer is not None:
        parts += ["### Asked", session.question, "### Answered", session.answer]
    return "\n\n".join(parts) + "\n"


async def move_to_done(sc_id: int) -> int:
    """Move the story's workflow state to where a merged one belongs; return the state it is in then."""
    async with shortcut_api() as shortcut:
        story = await shortcut.story(sc_id)
        state = done_state(story, await shortcut.workflows(), settings().done_state)
        if story.workflow_state_id != state.id:
            await shortcut.move(sc_id, state.id)
    return state.id


def done_state(story: Story, workflows: list[Workflow], named: str | None) -> WorkflowState:
    """Where a merged story belongs: the state `named`, else where it is if that is done, else the first that is.

    Raises:
        Escalate: the story's workflow has no such state.
    """
    states = [state for workflow in workflows if workflow.id == story.workflow_id for state in workflow.states]
    if named is not None:
        fitting = [state for state in states if state.name.casefold() == named.casefold()]
    else:
        done = [state for state in states if state.type == "done"]
        fitting = [state for state in done if state.id == story.workflow_state_id] or done
    if not fitting:
        names = ", ".join(state.name for state in states) or "no state at all"
        raise Escalate(f"set PATCH_DONE_STATE to a state of the story's workflow, which has {names}")
    return fitting[0]
