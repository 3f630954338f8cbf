"""Run by a Python that has `ollama`: what it gets from the server at argv[1], as JSON."""

import json
import sys

import ollama

HELLO = [{"role": "user", "content": "Hello"}]
ASKED = {"model": "tiny", "messages": HELLO, "options": {"temperature": 0, "num_predict": 24}}
TOOL = json.loads(sys.argv[2])
FORM = {"enum": ["yes", "no"]}

client = ollama.Client(host=sys.argv[1])
assert [model.model for model in client.list().models] == ["tiny"]
assert "tools" in client.show("tiny").capabilities
whole = client.chat(**ASKED, tools=None, keep_alive="5m")
chunks = list(client.chat(**ASKED, stream=True))
generated = client.generate(model="tiny", prompt="Hello", options=ASKED["options"])
assert client.generate(model="tiny", prompt="", keep_alive=0).done_reason == "unload"
said = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
}
came = {"role": "tool", "content": "yes", "tool_name": "weather"}
assert client.chat(**{**ASKED, "messages": [*HELLO, said, came]}, tools=[TOOL]).message.content
try:
    client.chat("tiny", [{**HELLO[0], "images": ["QUFB"]}])
    refused = None
except ollama.ResponseError as error:
    refused = error.error
found = {
    "texts": {
        "whole": whole.message.content,
        "streamed": "".join(chunk.message.content for chunk in chunks),
        "generated": generated.response,
    },
    "tokens": [whole.eval_count, chunks[-1].eval_count, generated.eval_count],
    "calls": [],
    "formed": [client.chat("tiny", HELLO, format=FORM).message.content],
    "refused": refused,
}
print(json.dumps(found))
