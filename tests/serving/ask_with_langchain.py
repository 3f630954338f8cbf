"""Run by a Python that has `langchain-openai`: what it gets from the server at argv[1], as JSON."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI

asked = {
    "base_url": sys.argv[1] + "/v1",
    "api_key": "none",
    "model": "tiny",
    "temperature": 0,
    "max_retries": 0,
}
chat = ChatOpenAI(**asked, max_tokens=24)
whole = chat.invoke("Hello")
called = ChatOpenAI(**asked, max_tokens=90).bind_tools([json.loads(sys.argv[2])], tool_choice="required")
schema = {"title": "answer", "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
formed = ChatOpenAI(**asked, max_tokens=60).with_structured_output(
    {**schema, "additionalProperties": False}, method="json_schema"
)
found = {
    "whole": whole.content,
    "tokens": whole.usage_metadata["output_tokens"],
    "streamed": "".join(chunk.content for chunk in chat.stream("Hello")),
    "async": asyncio.run(chat.ainvoke("Hello")).content,
    "called": called.invoke("Hello").tool_calls[0]["name"],
    "formed": sorted(formed.invoke("Hello")),
}
print(json.dumps(found))
