"""Run by a Python that has `litellm`: what it gets from the server at argv[1], as JSON.

The last call is aider's own (`Model.send_completion` in 0.86.2), which talks through litellm.
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # ask no other host

import litellm

TOOL = json.loads(sys.argv[2])
server = {"model": "openai/tiny", "api_base": sys.argv[1] + "/v1", "api_key": "none"}
asked = {**server, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}
calling = {"max_tokens": 90, "tools": [TOOL]}
form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def call_of(reply) -> list[str]:
    function = reply.choices[0].message.tool_calls[0].function
    return [function.name, function.arguments]


whole = litellm.completion(**asked)
response = litellm.responses(**server, input="Hello", max_output_tokens=24, temperature=0)
by_aider = list(litellm.completion(**asked | calling, tool_choice=named, stream=True, timeout=600))
found = {
    "texts": {
        "whole": whole.choices[0].message.content,
        "streamed": text_of(litellm.completion(**asked, stream=True)),
        "async": asyncio.run(litellm.acompletion(**asked)).choices[0].message.content,
        "text": litellm.text_completion(
            **server, prompt="<|user|>Hello<|end|><|assistant|>", max_tokens=24, temperature=0
        )
        .choices[0]
        .text,
        "response": response.output_text,
    },
    "tokens": [whole.usage.completion_tokens, response.usage.output_tokens],
    "calls": [
        call_of(litellm.completion(**asked | calling, tool_choice="required")),
        call_of(litellm.stream_chunk_builder(by_aider)),
    ],
    "formed": [litellm.completion(**asked, response_format=form).choices[0].message.content],
}
print(json.dumps(found))
