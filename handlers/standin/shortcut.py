"""The stand-in's Shortcut: the part of REST v3 that the flow uses, and the webhooks that its writes cause."""

from __future__ import annotations

import uuid
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from handlers.settings import settings
from handlers.standin.deliveries import send_shortcut
from handlers.standin.errands import Errands
from handlers.standin.state import BOT_ID, PERSON_ID, STATES, WORKFLOW_ID, Comment, State, Story, now

AT_ONCE = timedelta(0)
ANSWER = "Something small that is easy to review."


class LabelName(BaseModel):
    name: str


class NewStory(BaseModel):
    name: str
    description: str = ""
    labels: list[LabelName] = []


class StoryUpdate(BaseModel):
    name: str | None = None
    labels: list[LabelName] | None = None
    workflow_state_id: int | None = None


class NewComment(BaseModel):
    text: str
    external_id: str | None = None


class ShortcutStandin:
    """Who calls with our own token is the bot; everybody else, with a token or without, is a person."""

    def __init__(self, state: State, errands: Errands, url: str, delay: timedelta) -> None:
        self.state = state
        self.errands = errands
        self.url = url
        self.delay = delay
        for story in state.stories.values():
            self._answer_later(story)

    def routes(self) -> list[Route]:
        return [
            Route("/stories", self.create_story, methods=["POST"]),
            Route("/stories/{sc_id:int}", self.read_story, methods=["GET"]),
            Route("/stories/{sc_id:int}", self.update_story, methods=["PUT"]),
            Route("/stories/{sc_id:int}/comments", self.list_comments, methods=["GET"]),
            Route("/stories/{sc_id:int}/comments", self.create_comment, methods=["POST"]),
            Route("/workflows", self.list_workflows, methods=["GET"]),
            Route("/member", self.read_member, methods=["GET"]),
        ]

    # ---- what is asked

    async def create_story(self, request: Request) -> JSONResponse:
        new = NewStory.model_validate_json(await request.body())
        labels = [self.state.label(label.name) for label in new.labels]
        story = Story(id=self.state.next_id(), name=new.name, description=new.description, labels=labels)
        self.state.stories[story.id] = story
        self.state.save()
        created = {**self._action(story, "create"), "label_ids": [label.id for label in labels]}
        self._send(caller(request), story.id, [created], [reference(label) for label in labels])
        return JSONResponse(self._story(story), 201)

    async def read_story(self, request: Request) -> JSONResponse:
        return JSONResponse(self._story(self._found(request)))

    async def update_story(self, request: Request) -> JSONResponse:
        story, update = self._found(request), StoryUpdate.model_validate_json(await request.body())
        changes, references = self._apply(story, update)
        self.state.save()
        if changes:
            action = {**self._action(story, "update"), "changes": changes}
            self._send(caller(request), story.id, [action], references)
        return JSONResponse(self._story(story))

    async def list_comments(self, request: Request) -> JSONResponse:
        return JSONResponse([comment.model_dump(mode="json") for comment in self._found(request).comments])

    async def create_comment(self, request: Request) -> JSONResponse:
        story, new = self._found(request), NewComment.model_validate_json(await request.body())
        comment = self._comment(story, caller(request), new.text, new.external_id)
        self._answer_later(story)
        return JSONResponse(comment.model_dump(mode="json"), 201)

    async def list_workflows(self, request: Request) -> JSONResponse:
        states = [{"id": number, "name": name, "type": kind} for number, (name, kind) in STATES.items()]
        return JSONResponse([{"id": WORKFLOW_ID, "name": "Engineering", "states": states}])

    async def read_member(self, request: Request) -> JSONResponse:
        return JSONResponse({"id": caller(request), "mention_name": "stand-in"})

    # ---- what happens then

    def _found(self, request: Request) -> Story:
        """The story asked for. One that is not known yet is made up, with our label: its event came from elsewhere."""
        sc_id: int = request.path_params["sc_id"]
        if sc_id not in self.state.stories:
            label = self.state.label(settings().label)
            self.state.stories[sc_id] = Story(id=sc_id, name=f"Story {sc_id} of the stand-in", labels=[label])
            self.state.save()
        return self.state.stories[sc_id]

    def _apply(self, story: Story, update: StoryUpdate) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        changes: dict[str, Any] = {}
        references: list[dict[str, Any]] = []
        if update.name is not None and update.name != story.name:
            changes["name"] = {"new": update.name, "old": story.name}
            story.name = update.name
        if update.labels is not None:
            labels = [self.state.label(label.name) for label in update.labels]
            adds = [label.id for label in labels if label not in story.labels]
            removes = [label.id for label in story.labels if label not in labels]
            if adds or removes:
                changes["label_ids"] = {"adds": adds, "removes": removes}
            references += [reference(label) for label in (*labels, *story.labels)]
            story.labels = labels
        state_id = update.workflow_state_id
        if state_id is not None and state_id != story.workflow_state_id:
            if state_id not in STATES:
                raise HTTPException(422, f"there is no workflow state {state_id}")
            changes["workflow_state_id"] = {"new": state_id, "old": story.workflow_state_id}
            story.workflow_state_id = state_id
        return changes, references

    def _comment(self, story: Story, author_id: str, text: str, external_id: str | None = None) -> Comment:
        comment = Comment(id=self.state.next_id(), text=text, author_id=author_id, external_id=external_id)
        story.comments.append(comment)
        self.state.save()
        said = {
            "id": comment.id,
            "entity_type": "story-comment",
            "action": "create",
            "text": text,
            "author_id": author_id,
            "app_url": f"{self._app_url(story)}#activity-{comment.id}",
        }
        updated = {**self._action(story, "update"), "changes": {"comment_ids": {"adds": [comment.id]}}}
        self._send(author_id, comment.id, [said, updated], [])
        return comment

    def _answer_later(self, story: Story) -> None:
        """A person looks after a while, and answers what the bot asked last."""
        if story.comments and story.comments[-1].author_id == bot_id() and "?" in story.comments[-1].text:
            self.errands.after(self.delay, partial(self._answer, story, story.comments[-1].id))

    async def _answer(self, story: Story, question_id: int) -> None:
        if story.comments[-1].id == question_id:
            self._comment(story, PERSON_ID, ANSWER)

    def _send(self, member_id: str, primary_id: int, actions: list[Any], references: list[Any]) -> None:
        event = {
            "id": str(uuid.uuid4()),
            "changed_at": now().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "version": "v1",
            "primary_id": primary_id,
            "actor_name": "The bot" if member_id == bot_id() else "A person",
            "member_id": member_id,
            "actions": actions,
            "references": references,
        }
        self.errands.after(AT_ONCE, partial(send_shortcut, event))

    def _action(self, story: Story, action: str) -> dict[str, Any]:
        return {
            "id": story.id,
            "entity_type": "story",
            "action": action,
            "name": story.name,
            "story_type": story.story_type,
            "app_url": self._app_url(story),
        }

    def _story(self, story: Story) -> dict[str, Any]:
        return {**story.model_dump(mode="json"), "app_url": self._app_url(story)}

    def _app_url(self, story: Story) -> str:
        # Events name their story by this path, so it has the form of Shortcut's own.
        return f"{self.url}/standin/story/{story.id}"


def reference(label: Any) -> dict[str, Any]:
    return {"id": label.id, "entity_type": "label", "name": label.name}


def caller(request: Request) -> str:
    """The member that a request's token belongs to."""
    ours = settings().shortcut_token
    token = request.headers.get("shortcut-token")
    return bot_id() if ours is not None and token == ours.get_secret_value() else PERSON_ID


def bot_id() -> str:
    return settings().shortcut_bot or BOT_ID
