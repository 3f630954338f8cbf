"""Run by a Python that has `litellm`: what it gets from the server at argv[1], as JSON."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # ask no other host

import litellm

asked = {
    "model": "openai/tiny",
    "api_base": sys.argv[1] + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 24,
    "temperature": 0,
}
whole = litellm.completion(**asked)
called = litellm.completion(
    **asked | {"max_tokens": 90}, tools=[json.loads(sys.argv[2])], tool_choice="required"
)
streamed = litellm.completion(**asked, stream=True)
found = {
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    "async": asyncio.run(litellm.acompletion(**asked)).choices[0].message.content,
    "called": called.choices[0].message.tool_calls[0].function.name,
}
print(json.dumps(found))
