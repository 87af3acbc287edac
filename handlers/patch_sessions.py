"""The patch flow: a story with the label `patch` becomes a reviewed pull request.

::

    received ── clarifying ──┬── clarified ── drafting ── drafted ── opening ── in_review ──┬── merged …
                             └── asked ──┘                                                  └── closed
                                                                … merged ── finishing ── finished

Events move a session inside one database transaction and never touch the network; phases do the slow work, one owner
at a time. Whatever cannot be done ends in `escalated`, with the reason in `last_error`.

Taking the label off or deleting the story stops nothing: events come in any order, and a session that has begun ends
with its pull request. A session whose story is gone escalates when it reads it.
"""

from __future__ import annotations

import re
from datetime import timedelta

from handlers.models import Branch, ClosedPullRequest, CommentEvent, PatchSession, PullRequestEvent, StoryEvent
from handlers.patch_effects import (
    comment_once,
    find_or_open,
    find_questions,
    move_to_done,
    push_patch,
    read_story,
    run_drafter,
)
from handlers.settings import needed, settings
from handlers.sources import github, shortcut
from webhooks import Claim, Done, Event, Gate, Ignore, Park, Transaction

sessions = Gate("patch_sessions", key="sc_id", row=PatchSession, statuses=("closed",))


@shortcut.on("story.create", model=StoryEvent)
@shortcut.on("story.update", model=StoryEvent)
async def open_session(event: Event[StoryEvent], tx: Transaction) -> None:
    story, label = event.data, settings().label
    if label.casefold() not in {name.casefold() for name in story.labels_added}:
        unnamed = (f"{id} (the body does not say its name)" for id in sorted(map(str, story.labels_unnamed)))
        added = ", ".join((*sorted(story.labels_added), *unnamed)) or "none"
        raise Ignore(f"label {label!r} not among those added: {added}")
    title = story.name or f"sc-{story.id}"
    await sessions.open(tx, sc_id=story.id, title=title, story_url=story.app_url)


@sessions.phase("received", claimed="clarifying", done=("clarified", "asked"))
async def clarify(session: PatchSession, claim: Claim[PatchSession]) -> Done:
    """Ask on the story what has to be known first; without a clarifier, nothing has to be."""
    if settings().clarifier is None:
        return claim.done("clarified")
    story = await claim.once("story", read_story, session.sc_id, retry_safe=True)
    found = await claim.once("clarify", find_questions, story, retry_safe=True, timeout=timedelta(minutes=6))
    if not found.questions:
        return claim.done("clarified")
    needed(settings().shortcut_bot, "WEBHOOKS_SHORTCUT_BOT", "the bot's member id, so that it never answers itself")
    question = "\n\n".join(found.questions)
    mark = claim.idempotency_key("ask")
    comment = await claim.once("ask", comment_once, session.sc_id, question, mark, retry_safe=True)
    return claim.done("asked", question=question, question_comment_id=comment.id, asked_at=comment.created_at)


@shortcut.on("story-comment.create", model=CommentEvent)
async def answer(event: Event[CommentEvent], tx: Transaction) -> None:
    """A person's first word after the question moves the session on; the drafter reads later ones with the story."""
    comment = event.data
    if comment.story_id is None or not comment.text:
        raise Ignore("not a comment with text on a story")
    if comment.author_id is not None and comment.author_id == settings().shortcut_bot:
        raise Ignore("our own comment")
    answered = {"answer": comment.text, "answered_by": comment.author_id}
    moved = await sessions.advance(tx, comment.story_id, "asked", "clarified", **answered)
    if not moved:
        if moved.found is None:
            raise Ignore(f"no session for story {comment.story_id}")
        # The question may be on the story already while its phase is not yet done.
        raise Park(sessions, comment.story_id, while_in=("received", "clarifying"), missing="ignore")
    if await older_than_the_question(event, comment, tx):
        raise Ignore("older than the question")  # which takes the move back


QUESTION = "SELECT question_comment_id, asked_at FROM patch_sessions WHERE sc_id = %(sc_id)s"


async def older_than_the_question(event: Event[CommentEvent], comment: CommentEvent, tx: Transaction) -> bool:
    """Whether the comment is the question itself or was there before it: by the event's time, or by its number."""
    session = await (await tx.execute(QUESTION, {"sc_id": comment.story_id})).fetchone() or {}
    question_id, asked_at = session.get("question_comment_id"), session.get("asked_at")
    if question_id is not None and comment.id <= question_id:
        return True
    return event.occurred_at is not None and asked_at is not None and event.occurred_at < asked_at


@sessions.phase(
    "clarified",
    claimed="drafting",
    done="drafted",
    lease=timedelta(minutes=1),
    timeout=timedelta(minutes=20),
    max_attempts=3,
)
async def draft(session: PatchSession, claim: Claim[PatchSession]) -> Done:
    """Let the configured command write a patch. Local work, so a repetition is safe."""
    story = await claim.once("story", read_story, session.sc_id, retry_safe=True)
    patch = await claim.once(
        "draft",
        run_drafter,
        story,
        session.question,
        session.answer,
        retry_safe=True,
        timeout=timedelta(minutes=17),
    )
    return claim.done(patch=patch.diff, base_commit=patch.base_commit)


@sessions.phase("drafted", claimed="opening", done="in_review")
async def open_pull_request(session: PatchSession, claim: Claim[PatchSession]) -> Done:
    """Push the branch that carries the story's number, propose it, and say so on the story."""
    sha = await claim.once("push", push_patch, session, retry_safe=True, timeout=timedelta(minutes=11))
    pull_request = await claim.once("pull request", find_or_open, session, sha, retry_safe=True)
    text, mark = f"Pull request: {pull_request.html_url}", claim.idempotency_key("link")
    await claim.once("link", comment_once, session.sc_id, text, mark, retry_safe=True)
    return claim.done(
        pull_request_number=pull_request.number,
        pull_request_url=pull_request.html_url,
        repository_id=pull_request.repository_id,
    )


@github.on("pull_request.closed", model=PullRequestEvent)
async def pull_request_closed(event: Event[PullRequestEvent], tx: Transaction) -> None:
    pull_request = event.data.pull_request
    sc_id = story_of(pull_request.head)
    await check_repository(pull_request, sc_id, tx)
    if pull_request.merged:  # in the end: it may have been closed before, and opened again
        moved = await sessions.advance(tx, sc_id, ("in_review", "closed"), "merged", merged_at=pull_request.merged_at)
    else:
        moved = await sessions.advance(tx, sc_id, "in_review", "closed")
    if not moved:  # GitHub was quicker than our own phase, or a person has to mend that phase first
        raise Park(sessions, sc_id, while_in=UNDER_WAY, missing="ignore")


UNDER_WAY = ("drafted", "opening", "escalated")
"""Where a session may be though its pull request is on GitHub already."""
REPOSITORY = "SELECT status, repository_id FROM patch_sessions WHERE sc_id = %(sc_id)s"


def story_of(head: Branch) -> int:
    """The key that the branch carries back.

    Raises:
        Ignore: the branch is not one of ours.
    """
    key = re.fullmatch(r"patch/sc-([1-9][0-9]{0,18})", head.ref)
    if key is None or int(key[1]) >= 2**63:
        raise Ignore(f"branch {head.ref!r} is not one of ours (patch/sc-<id>)")
    return int(key[1])


async def check_repository(pull_request: ClosedPullRequest, sc_id: int, tx: Transaction) -> None:
    """See that the pull request is in the repository where the session's was opened, whatever that is called now.

    Anybody can name a branch of a fork like ours, so those do not count. While no repository is recorded, the one that
    the settings name is ours.

    Raises:
        Ignore: it is in another repository, or from a fork.
        Park: the session is about to say which repository is its own.
    """
    head, base = pull_request.head.repo, pull_request.base.repo
    if head is None or base is None or (head.id, head.full_name) != (base.id, base.full_name):
        raise Ignore("the branch is a fork's")
    session = await (await tx.execute(REPOSITORY, {"sc_id": sc_id})).fetchone() or {"repository_id": None}
    ours = settings().github_repository
    if session["repository_id"] is not None:
        if session["repository_id"] != base.id:
            raise Ignore(f"repository {base.full_name} is not the one of this session's pull request")
    elif ours is not None and base.full_name.casefold() != ours.casefold():
        if session.get("status") in UNDER_WAY:
            raise Park(sessions, sc_id, while_in=UNDER_WAY)
        raise Ignore(f"repository {base.full_name} is not ours ({ours})")


@sessions.phase("merged", claimed="finishing", done="finished")
async def finish(session: PatchSession, claim: Claim[PatchSession]) -> Done:
    await claim.once("done", move_to_done, session.sc_id, retry_safe=True)
    return claim.done()
