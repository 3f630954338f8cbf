"""Run by a Python that has `openai`: what it gets from the server at argv[1], as JSON."""

import asyncio
import json
import sys

import openai

HELLO = [{"role": "user", "content": "Hello"}]
ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0}
SAME = {"model": "tiny", "input": HELLO, "max_output_tokens": 24, "temperature": 0}
TOOL = json.loads(sys.argv[2])
CALLING = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90}
FORM = {"name": "a", "schema": {"enum": ["yes", "no"]}}
FORMED = {"response_format": {"type": "json_schema", "json_schema": FORM}}
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
        except asyncio.CancelledError:
            return {"async": whole.choices[0].message.content, "async_streamed": text_of(streamed)}
    raise AssertionError("the answer could not be cancelled")


client = openai.OpenAI(**address)
chat = client.chat.completions
whole = chat.create(**ASKED)
chunks = list(chat.create(**ASKED, stream=True, stream_options={"include_usage": True}))
response = client.responses.create(**SAME)
events = list(client.responses.create(**SAME, stream=True))
with chat.create(**{**ASKED, "max_tokens": 400}, stream=True) as cut:
    next(iter(cut))  # cancelled midway
with chat.stream(**ASKED | CALLING) as stream:
    called = stream.get_final_completion().choices[0].message.tool_calls[0].function
calling = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
with client.responses.stream(**SAME | calling | {"max_output_tokens": 90}) as stream:
    (item,) = stream.get_final_response().output
form = {"format": {"type": "json_schema", **FORM}}
try:
    chat.create(**{**ASKED, "temperature": 9})
    refused = None
except openai.BadRequestError as error:
    refused = error.param
found = {
    "texts": {
        "whole": whole.choices[0].message.content,
        "streamed": text_of(chunks),
        "response": response.output_text,
        "response_streamed": "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        ),
        **asyncio.run(asynchronously()),
    },
    "tokens": [
        whole.usage.completion_tokens,
        chunks[-1].usage.completion_tokens,
        response.usage.output_tokens,
        events[-1].response.usage.output_tokens,
    ],
    "calls": [
        [call.name, call.arguments]
        for call in (
            chat.create(**ASKED | CALLING).choices[0].message.tool_calls[0].function,
            called,
            client.responses.create(**SAME | calling | {"max_output_tokens": 90}).output[0],
            item,
        )
    ],
    "formed": [
        chat.create(**ASKED, **FORMED).choices[0].message.content,
        text_of(chat.create(**ASKED, **FORMED, stream=True)),
        client.responses.create(**SAME, text=form).output_text,
    ],
    "models": [model.id for model in client.models.list()],
    "completion": client.completions.create(model="tiny", prompt="Hello", max_tokens=8).choices[0].text,
    "refused": refused,
}
print(json.dumps(found))
