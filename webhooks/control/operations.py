"""What the JSON API can be asked, declared once: routes, the reading of what is asked, and the OpenAPI description."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MOST_BYTES = 1024 * 1024
REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_TYPES: dict[str, dict[str, Any]] = {"int": {"type": "integer", "minimum": 0}}

Model = TypeVar("Model", bound=BaseModel)
Answered: TypeAlias = type[BaseModel] | tuple[type[BaseModel], ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that can be asked.

    Args:
        path: as Starlette reads it.
        endpoint: what answers.
        summary: one line for a person.
        answers: by status, the model of the JSON that is answered (or several), or the media type of what is no JSON.
        method: GET or POST.
        query: the model of its query parameters; others are refused.
        body: the model of its JSON body.
    """

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    answers: Mapping[int, Answered]
    method: Literal["GET", "POST"] = "GET"
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None

    def route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])


def read_query(request: Request, model: type[Model]) -> Model:
    """Read the query parameters; one that is given several times is a list where the model has one.

    Raises:
        HTTPException: 400, naming the parameter.
    """
    query = request.query_params
    lists = {name for name, field in model.model_fields.items() if "list" in str(field.annotation)}
    given = {name: query.getlist(name) if name in lists else query[name] for name in query}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refused(error, "the query") from None


async def read_body(request: Request, model: type[Model]) -> Model:
    """Read a JSON body.

    Raises:
        HTTPException: it is too long, or not what the model says; the message names the field.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES} bytes")
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        raise _refused(error, "the body") from None


def _refused(error: ValidationError, whole: str) -> HTTPException:
    faults = error.errors(include_url=False, include_input=False)
    told = [f"{'.'.join(map(str, fault['loc'])) or whole}: {_told(fault)}" for fault in faults[:5]]
    return HTTPException(400, "; ".join(told))


def _told(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such thing here"
    return str(fault["msg"]).removeprefix("Value error, ")


def openapi(operations: Iterable[Operation], version: str, error: type[BaseModel]) -> dict[str, Any]:
    """Describe operations in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0).

    Args:
        operations: all of them.
        version: of the library.
        error: the model of every answer that is none of an operation's own.
    """
    listed = list(operations)
    answered = {model for one in listed for answer in one.answers.values() for model in _models(answer)}
    asked = {model for one in listed for model in (one.query, one.body) if model is not None}
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "serialization") for model in sorted({*answered, error}, key=lambda model: model.__name__)),
        *((model, "validation") for model in sorted(asked, key=lambda model: model.__name__)),
    ]
    schemas, definitions = models_json_schema(wanted, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for one in listed:
        paths.setdefault(_PARAMETER.sub(r"{\1}", one.path), {})[one.method.lower()] = _described(one, schemas, error)
    return {
        "openapi": "3.1.0",
        "info": {"title": "webhooks control plane", "version": version},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "WEBHOOKS_CONTROL_TOKEN, where it is set"}
            },
        },
    }


def _described(one: Operation, schemas: Mapping[Any, Any], error: type[BaseModel]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TYPES.get(kind, {"type": "string"})}
        for name, kind in _PARAMETER.findall(one.path)
    ]
    if one.query is not None:
        properties = one.query.model_json_schema()["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()
        ]
    answers = {str(status): _answer(model, schemas) for status, model in one.answers.items()}
    answers["default"] = {"description": "why not", **_content("application/json", schemas[error, "serialization"])}
    described: dict[str, Any] = {"summary": one.summary, "operationId": _name(one), "responses": answers}
    if parameters:
        described["parameters"] = parameters
    if one.body is not None:
        content = _content("application/json", schemas[one.body, "validation"])
        described["requestBody"] = {"required": True, **content}
    return described


def _models(answer: Answered) -> tuple[type[BaseModel], ...]:
    return answer if isinstance(answer, tuple) else () if isinstance(answer, str) else (answer,)


def _answer(answer: Answered, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"description": answer, **_content(answer, {"type": "string"})}
    models = _models(answer)
    told = " / ".join((model.__doc__ or model.__name__).strip().splitlines()[0] for model in models)
    found = [schemas[model, "serialization"] for model in models]
    return {"description": told, **_content("application/json", found[0] if len(found) == 1 else {"anyOf": found})}


def _content(media_type: str, schema: Any) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _name(one: Operation) -> str:
    words = re.findall(r"\w+", _PARAMETER.sub(r"by_\1", one.path.removeprefix("/api/")))
    return "_".join((one.method.lower(), *words))
