"""Run by a Python that has `langchain-openai`: what it gets from the server at argv[1], as JSON."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI

TOOL = json.loads(sys.argv[2])
SCHEMA = {
    "title": "answer",
    "type": "object",
    "properties": {"ok": {"enum": ["yes", "no"]}},
    "required": ["ok"],
}
asked = {
    "base_url": sys.argv[1] + "/v1",
    "api_key": "none",
    "model": "tiny",
    "temperature": 0,
    "max_retries": 0,
}
chat, long = ChatOpenAI(**asked, max_tokens=24), ChatOpenAI(**asked, max_tokens=90)
responses = ChatOpenAI(**asked, max_tokens=24, use_responses_api=True)
calling = long.bind_tools([TOOL], tool_choice="required")
formed = long.with_structured_output({**SCHEMA, "additionalProperties": False}, method="json_schema")
whole, response = chat.invoke("Hello"), responses.invoke("Hello")
streamed = sum(calling.stream("Hello"), AIMessageChunk(content=""))
found = {
    "texts": {
        "whole": whole.content,
        "streamed": "".join(chunk.content for chunk in chat.stream("Hello")),
        "async": asyncio.run(chat.ainvoke("Hello")).content,
        "response": response.text,
        "response_streamed": "".join(chunk.text for chunk in responses.stream("Hello")),
    },
    "tokens": [each.usage_metadata["output_tokens"] for each in (whole, response)],
    "calls": [
        [call["name"], json.dumps(call["args"])]
        for call in (*calling.invoke("Hello").tool_calls, *streamed.tool_calls)
    ],
    "formed": [json.dumps(formed.invoke("Hello")["ok"])],
}
print(json.dumps(found))
