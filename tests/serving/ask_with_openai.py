"""Run by a Python that has only the `openai` package: what it gets from the server at argv[1], as JSON."""

import asyncio
import json
import sys

import openai

HELLO = [{"role": "user", "content": "Hello"}]
ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
address = {"base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0}


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def asynchronously() -> dict:
    async with openai.AsyncOpenAI(**address) as client:
        whole = await client.chat.completions.create(**ASKED)
        stream = await client.chat.completions.create(**ASKED, stream=True)
        streamed = [chunk async for chunk in stream]
        endless = {**ASKED, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        cut = await client.chat.completions.create(**endless, stream=True)
        async for _ in cut:
            break
        await cut.close()
        waiting = asyncio.create_task(client.chat.completions.create(**endless))
        await asyncio.sleep(0.2)
        waiting.cancel()
        try:
            await waiting
            was_cancelled = False
        except asyncio.CancelledError:
            was_cancelled = True
    return {
        "async": whole.choices[0].message.content,
        "async_streamed": text_of(streamed),
        "was_cancelled": was_cancelled,
    }


client = openai.OpenAI(**address)
whole = client.chat.completions.create(**ASKED)
chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
with client.chat.completions.create(**{**ASKED, "max_tokens": 400}, stream=True) as cut:
    next(iter(cut))  # cancelled midway
try:
    client.chat.completions.create(**{**ASKED, "temperature": 9})
    refused = None
except openai.BadRequestError as error:
    refused = error.param
found = {
    "version": openai.__version__,
    "models": [model.id for model in client.models.list()],
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": text_of(chunks),
    "streamed_tokens": chunks[-1].usage.completion_tokens,
    "completion": client.completions.create(model="tiny", prompt="Hello", max_tokens=8).choices[0].text,
    "refused": refused,
    **asyncio.run(asynchronously()),
}
if len(sys.argv) > 2:
    tools = [json.loads(sys.argv[2])]
    called = client.chat.completions.create(**ASKED | {"max_tokens": 90}, tools=tools, tool_choice="required")
    found["called"] = called.choices[0].message.tool_calls[0].function.name
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    found["formed"] = client.chat.completions.create(**ASKED, response_format=form).choices[0].message.content
print(json.dumps(found))
