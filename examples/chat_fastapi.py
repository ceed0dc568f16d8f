"""A chat in FastAPI whose answers never wait for memory, and whose next process knows the whole conversation.

    pip install fastapi uvicorn
    MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo uvicorn chat_fastapi:app --app-dir examples

It starts without a memory server too, and answers while there is none.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Path, Query
from pydantic import BaseModel

import memlog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Message(BaseModel):
    role: Literal["user", "assistant"] = "user"
    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with memlog.open_log() as log:
        app.state.log = log
        yield


app = FastAPI(lifespan=lifespan)
logger = logging.getLogger(__name__)
ConversationId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{8,64}$")]


@app.post("/chats/{conversation_id}")
async def say(conversation_id: ConversationId, message: Message) -> Message:
    answer = Message(role="assistant", text=f"You said {message.text!r}.")  # a model's answer, in real life
    try:
        app.state.log.conversation(conversation_id).extend([message, answer])
    except memlog.BufferFullError:  # after a very long outage; the chat goes on all the same
        logger.exception("this turn is not remembered")
    return answer


@app.get("/chats/{conversation_id}")
async def history(conversation_id: ConversationId, last: Annotated[int, Query(ge=1, le=1000)] = 50) -> list[Any]:
    try:
        return [item.payload for item in await app.state.log.conversation(conversation_id).recall(last)]
    except memlog.MemoryUnavailableError as error:  # unknown is not the same as empty
        raise HTTPException(503, "the memory cannot be read just now") from error
