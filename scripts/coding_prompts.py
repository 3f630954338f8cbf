r"""Coding questions, to let a model answer that its heads are then trained on.

    python scripts/coding_prompts.py --output runs/coder/prompts.jsonl
    medusa distill --base qwen2.5-coder-1.5b --prompts runs/coder/prompts.jsonl \
        --output runs/coder/answers.jsonl

Nine kinds, in ten languages: to write code, with tests or without, to explain a topic or code, and to test,
mend, edit, translate and complete code. Six of ten questions come with code. That code is functions of
Python's standard library (PSF-2.0), of the Python that runs this script, so other versions of Python give
other questions. Each twenty questions, from the start of the file, hold the kinds in the same shares. None
of the questions of configs/coding_heldout.jsonl, which measure the heads, is among them.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

LANGUAGES = ("Python", "JavaScript", "TypeScript", "Java", "C", "C++", "C#", "Go", "Rust", "SQL")
"""Functions can be asked of all but the last."""

TASKS = """\
returns the second largest number in a list
reverses the words of a sentence
tells whether a string is a palindrome
counts how often each word occurs in a text
merges two sorted lists into one sorted list
removes duplicates from a list and keeps the order
computes the nth Fibonacci number with memoization
checks whether brackets in a string are balanced
converts a Roman numeral to an integer
converts an integer to a Roman numeral
finds the longest common prefix of a list of strings
rotates a matrix by 90 degrees
finds the first character of a string that does not repeat
computes the greatest common divisor of two numbers
lists all prime numbers below n with a sieve
sorts a list with quicksort
sorts a list with merge sort
searches a sorted array with binary search
computes the edit distance of two strings
finds the shortest path in a graph with breadth-first search
finds shortest paths in a weighted graph with Dijkstra's algorithm
sorts a directed graph topologically
detects a cycle in a linked list
reverses a linked list
inserts a value into a binary search tree
computes the depth of a binary tree
traverses a binary tree level by level
implements a stack with push, pop and peek
implements a queue with two stacks
implements an LRU cache with a fixed capacity
implements a min-heap
implements a trie with insert and search
implements a hash map with chaining
implements a rate limiter with a token bucket
implements a circular buffer
implements a simple event emitter
parses a CSV line with quoted fields
parses command line arguments of the form --name=value
parses an arithmetic expression and evaluates it
parses a query string into a map
reads a file line by line and counts the lines that contain a word
writes a list of records to a CSV file
reads a JSON file and prints the keys of its first object
copies a directory recursively
downloads a page over HTTP and returns its title
retries a call with exponential backoff
measures how long a call takes
formats a number of bytes for people, such as 1.5 MB
formats a duration in seconds as hours, minutes and seconds
validates an e-mail address
validates a credit card number with the Luhn algorithm
validates an IPv4 address
generates a random password of a given length
encrypts a text with a Caesar cipher
encodes a string with run-length encoding
converts a decimal number to binary
converts temperatures between Celsius and Fahrenheit
converts snake_case to camelCase
converts a nested list into a flat one
converts a date string to ISO 8601
computes the mean, the median and the mode of a list
computes the factorial of a number, for big results
computes the transpose of a matrix
multiplies two matrices
computes a moving average over a window
computes the power set of a set
lists all permutations of a string
finds all pairs in an array that sum to a target
finds the maximum sum of a contiguous subarray
finds the missing number in a list from 1 to n
finds the intersection of two arrays
finds anagrams in a list of words and groups them
finds the longest substring without repeating characters
finds the k most frequent elements
solves the towers of Hanoi
solves the knapsack problem with dynamic programming
solves a Sudoku by backtracking
solves the n queens problem
counts the ways to climb n stairs
counts islands in a grid
counts vowels and consonants in a text
checks whether two strings are anagrams
checks whether a number is an Armstrong number
checks whether a year is a leap year
checks whether a binary tree is balanced
prints a multiplication table
prints a pyramid of stars
prints the calendar of a month
simulates Conway's Game of Life for one step
simulates rolling two dice many times and counts the sums
models a bank account with deposits, withdrawals and a balance
models a shopping cart with discounts
models a library with books and loans
models a parking lot with places of three sizes
models a deck of cards that can be shuffled and dealt
plays tic-tac-toe on the command line
plays rock, paper, scissors against the computer
serves a to-do list over a REST API with four routes
serves static files over HTTP
logs every request with its time and status
watches a directory and prints files that change
runs tasks in parallel with a limited number of workers
shares a counter safely among threads
produces and consumes items through a bounded queue
debounces calls of a function
deep-copies a nested object
compares two versions such as 1.10.2 and 1.9
compresses a string by counting repeated characters
splits a list into chunks of a given size
zips two lists into a map
groups a list of objects by a property
sorts a list of people by last name, then by age
filters a list of orders by date and sums their amounts
paginates a list
builds an HTML table from a list of rows
builds a URL from a base and parameters
renders a template with {{name}} placeholders
escapes special characters of HTML
strips comments from source code
highlights search terms in a text
tokenizes a simple language into numbers, names and operators
"""

QUERIES = """\
lists the ten customers with the highest total of orders
finds duplicate e-mail addresses in a table of users
computes the running total of sales for each month
returns the second highest salary of each department
joins orders, customers and products, and keeps customers without orders
pivots monthly sales into columns
finds users who logged in on three days in a row
deletes duplicate rows but keeps the one with the lowest id
computes the share of each category in total revenue
finds gaps in a sequence of invoice numbers
creates tables for a blog with users, posts, comments and tags
ranks players by score within their country
returns the median of a column
compares this year's sales with those of the year before
finds employees who earn more than their manager
builds the tree of categories with a recursive query
"""

TOPICS = """\
the difference between a process and a thread
what a race condition is and how to avoid one
how a hash table works
when to use a linked list and when an array
what big O notation says, with examples
how garbage collection works
what a closure is
what recursion is and when it is a bad idea
the difference between an interface and an abstract class
what dependency injection is good for
what the SOLID principles are
how HTTP caching works
what REST is, and what makes an API RESTful
the difference between authentication and authorization
how JSON Web Tokens work
how to store passwords safely
what SQL injection is and how to prevent it
what cross-site scripting is
what an index of a database does
what the ACID properties are
what the CAP theorem says
the difference between optimistic and pessimistic locking
what a deadlock is
how async and await work
what an event loop is
the difference between unit tests and integration tests
what test-driven development is
what mocking is and when to avoid it
how git rebase differs from git merge
how to undo the last commit in git
how to resolve a merge conflict in git
what continuous integration is
what a Docker image is, and how a container differs from it
how to write a small Dockerfile for a web application
what Kubernetes does
what environment variables are good for
how regular expressions work, with five examples
how TLS protects a connection
what DNS does when I open a page
how floating point numbers are stored, and why 0.1 + 0.2 is not 0.3
what Unicode and UTF-8 are
the difference between a stack and a heap in memory
what a pointer is
what a memory leak is and how to find one
what ownership and borrowing are
what generics are good for
the difference between compiled and interpreted languages
what functional programming is
what a pure function is
what the observer pattern is
what the factory pattern is
what the singleton pattern is and why it is criticised
what a decorator is
what a generator is
how list comprehensions work
how exceptions should be handled
what a virtual environment is
how to profile a slow program
how to read a stack trace
how websockets differ from HTTP
what a message queue is good for
what microservices are and what they cost
how pagination of an API should work
what idempotence means for an API
how to design a database schema for a shop
what normalization of a database is
how to write good commit messages
how to name variables and functions well
how to review code well
how to make a web page accessible
how flexbox differs from grid in CSS
how to center an element in CSS
how state works in React
what a virtual DOM is
how to handle forms in React
how to structure a larger project
how to log in production
how to handle time zones
how to cache the results of a slow function
"""

WRITE = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}.",
    "In {language}, write code that {task}. Explain it briefly.",
    "Write {language} code that {task}. Only code, no explanation.",
    "How do I write something in {language} that {task}?",
    "Please give me a {language} implementation that {task}, with comments and an example.",
    "{language}: {task}. Handle empty input and errors.",
)
WRITE_TESTS = (
    "Write unit tests in {language} for a function that {task}.",
    "Write a {language} function that {task}, and tests for it.",
)
TEST = (
    "Write pytest tests for this function:\n\n{code}",
    "Write unittest tests for the following code. Cover edge cases.\n\n{code}",
    "Which cases should tests of this function cover? Write them.\n\n{code}",
)
EXPLAIN = (
    "Explain {topic}.",
    "Explain {topic}, with an example in {language}.",
    "I am new to programming. Explain {topic} in simple words.",
    "Explain {topic} in a few sentences.",
)
EXPLAIN_CODE = (
    "What does this function do?\n\n{code}",
    "Explain this code line by line:\n\n{code}",
    "Summarise this function in two sentences and name its complexity.\n\n{code}",
    "Write a docstring for this function, and return the function with it.\n\n{code}",
    "Review this code. What would you improve?\n\n{code}",
)
MEND = (
    "This function has a bug. Find it and return the corrected function.\n\n{broken}",
    "My tests fail with this code. What is wrong?\n\n{broken}",
    "Fix this code:\n\n{broken}",
)
EDIT = (
    "Add type hints to this function. Return only the code.\n\n{code}",
    "Rename the variables of this function so that it reads better. Return the whole function.\n\n{code}",
    "Add error handling to this function, and return all of it.\n\n{code}",
    "Add logging to this function. Return only the code.\n\n{code}",
    "Refactor this function to be simpler. Show the complete result.\n\n{code}",
    "Add comments to this code:\n\n{code}",
)
TRANSLATE = (
    "Translate this Python function to {language}:\n\n{code}",
    "Rewrite the following code in {language}. Only code.\n\n{code}",
)
COMPLETE = (
    "Complete this function. Return the whole function.\n\n{start}",
    "Continue this code:\n\n{start}",
)


@dataclass(frozen=True)
class Options:
    """Write coding questions, one JSON object a line."""

    output: Path
    """JSON lines to write."""
    limit: int = 4_000
    """Number of questions."""
    seed: int = 0


def library_functions(shortest: int = 5, longest: int = 40) -> list[str]:
    """The functions of Python's standard library that have so many lines, as source text without indent."""
    functions = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            if shortest <= node.end_lineno - node.lineno + 1 <= longest:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                functions.append(textwrap.dedent("\n".join(lines)))
    return sorted(set(functions))


def broken(code: str, noise: random.Random) -> str:
    """``code`` with one small mistake, where a place for one is found."""
    mistakes = (
        ("==", "!="),
        (" < ", " <= "),
        (" > ", " >= "),
        (" + 1", ""),
        (" not ", " "),
        (" and ", " or "),
    )
    found = [(right, wrong) for right, wrong in mistakes if right in code]
    if not found:
        return code
    right, wrong = noise.choice(found)
    return code.replace(right, wrong, 1)


def questions(noise: random.Random) -> dict[str, Callable[[], str]]:
    """What makes a question of each kind."""
    tasks, queries, topics = TASKS.splitlines(), QUERIES.splitlines(), TOPICS.splitlines()
    functions = library_functions()

    def fenced(text: str) -> str:
        return f"```python\n{text}\n```"

    def about_task(forms: tuple[str, ...]) -> str:
        language = noise.choice(LANGUAGES)
        task = noise.choice(queries if language == "SQL" else tasks)
        text = noise.choice(forms).format(language=language, task=task)
        return text.replace("SQL function", "SQL query").replace("SQL program", "SQL script")

    def about_code(forms: tuple[str, ...]) -> str:
        code = noise.choice(functions)
        lines = code.splitlines()
        return noise.choice(forms).format(
            code=fenced(code),
            broken=fenced(broken(code, noise)),
            start=fenced("\n".join(lines[: max(2, len(lines) // 2)])),
            language=noise.choice(LANGUAGES[1:-1]),
        )

    def about_topic() -> str:
        return noise.choice(EXPLAIN).format(topic=noise.choice(topics), language=noise.choice(LANGUAGES[:-1]))

    return {
        "write": lambda: about_task(WRITE),
        "explain": about_topic,
        "explain-code": lambda: about_code(EXPLAIN_CODE),
        "write-tests": lambda: about_task(WRITE_TESTS),
        "test": lambda: about_code(TEST),
        "mend": lambda: about_code(MEND),
        "edit": lambda: about_code(EDIT),
        "translate": lambda: about_code(TRANSLATE),
        "complete": lambda: about_code(COMPLETE),
    }


SHARES = (
    "write",
    "explain-code",
    "write",
    "edit",
    "explain",
    "mend",
    "write",
    "translate",
    "test",
    "complete",
)
"""The kinds of ten questions in a row; every second "explain" is "write-tests"."""


def main(options: Options) -> None:
    noise = random.Random(options.seed)
    make = questions(noise)
    kept: set[str] = set()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        while len(kept) < options.limit:
            kind = SHARES[len(kept) % len(SHARES)]
            if kind == "explain" and len(kept) % (2 * len(SHARES)) >= len(SHARES):
                kind = "write-tests"
            question = make[kind]()
            if question not in kept:
                kept.add(question)
                file.write(json.dumps({"category": kind, "prompt": question}) + "\n")
    print(f"{len(kept)} questions in {options.output}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
