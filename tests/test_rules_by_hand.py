"""Hard rules on outputs beyond the corpus: what the tools print, written down by hand, and what must stay silent."""

import pytest

from oprd.rollout.rules import matches

BASH = [  # (rule or None, command, exit code, output)
    ('hard_go_compile_error', 'cd svc && go test ./... 2>&1 | tail -20', 0,
     '# x/svc\n./a.go:10:2: undefined: foo\nFAIL\tx/svc [build failed]'),
    ('hard_go_compile_error', 'go build ./...', 1,
     '# x\n./main.go:5:1: syntax error: non-declaration statement outside function body'),
    ('hard_go_compile_error', 'make build', 2,
     'go build -o bin/x ./cmd/x\n# x/cmd\ncmd/x/main.go:7:3: undefined: run\nmake: *** [Makefile:3:'
     ' build] Error 1'),
    ('hard_go_compile_error', 'go test ./p -run TestA', 1,
     '# x/p [x/p.test]\np/p_test.go:9:15: cannot use 1 (untyped int constant) as string value in '
     'argument to F\nFAIL\tx/p [build failed]'),
    ('hard_go_compile_error', 'go run .', 1, '# x\n./a.go:4:2: "os" imported and not used'),
    ('hard_go_compile_error', 'go test -json ./brokentest', 1,
     '{"ImportPath":"x/brokentest","Action":"build-output","Output":"brokentest/a.go:3:4: undefi'
     'ned: Sub\\n"}\n{"Action":"fail"}'),
    ('hard_go_signature_callers', 'go vet ./...', 1,
     '# x\nvet: ./a.go:3:9: not enough arguments in call to f\n\thave ()\n\twant (int)'),
    ('hard_go_signature_callers', 'go build', 1,
     '# x\n./a.go:3:9: too many return values\n\thave (int, error)\n\twant (int)'),
    ('hard_go_signature_callers', 'go test ./...', 1,
     '# x\n./a.go:3:9: impossible type assertion: s.(T)\n\tT does not implement S (missing method G'
     'et)'),
    ('hard_missing_file_path_narrow', 'ls nodir', 2, "ls: cannot access 'nodir': No such file or directory"),
    ('hard_missing_file_path_narrow', 'cd nodir && ls', 1, 'bash: line 1: cd: nodir: No such file or directory'),
    ('hard_missing_file_path_narrow', 'cd nodir && go test ./...', 1, 'bash: cd: nodir: No such file or directory'),
    ('hard_missing_file_path_narrow', 'cat a.py b.py | head', 0, 'cat: a.py: No such file or directory'),
    ('hard_missing_file_path_narrow', 'cargo test --manifest-path x/Cargo.toml', 101,
     'error: manifest path `x/Cargo.toml` does not exist'),
    ('hard_missing_file_path_narrow', 'tail -5 x.log', 1,
     "tail: cannot open 'x.log' for reading: No such file or directory"),
    ('hard_missing_file_path_narrow', 'git show HEAD:nofile', 128, "fatal: path 'nofile' does not exist in 'HEAD'"),
    ('hard_missing_file_path_narrow', 'git add nofile', 128, "fatal: pathspec 'nofile' did not match any files"),
    ('hard_missing_file_path_narrow', 'diff a b', 2, 'diff: a: No such file or directory'),
    ('hard_missing_file_path_narrow', 'cp a b', 1, "cp: cannot stat 'a': No such file or directory"),
    ('hard_missing_file_path_narrow', 'mv a b', 1, "mv: cannot stat 'a': No such file or directory"),
    ('hard_missing_file_path_narrow', 'stat a', 1, "stat: cannot statx 'a': No such file or directory"),
    ('hard_missing_file_path_narrow', 'sh run.sh', 2, 'sh: 0: cannot open run.sh: No such file'),
    ('hard_missing_file_path_narrow', 'bash scripts/x.sh', 127, 'bash: scripts/x.sh: No such file or directory'),
    ('hard_missing_file_path_narrow', 'ruby x.rb', 1, 'ruby: No such file or directory -- x.rb (LoadError)'),
    ('hard_missing_file_path_narrow', "awk '{print}' nofile", 2,
     'awk: cannot open "nofile" (No such file or directory)'),
    ('hard_missing_file_path_narrow', 'go vet ./nope', 1, 'stat /r/nope: directory not found'),
    ('hard_missing_file_path_narrow', 'go run ./cmd/none.go', 1, 'stat ./cmd/none.go: no such file or directory'),
    ('hard_missing_file_path_narrow', 'go test a/missing_test.go', 1,
     'no required module provides package a/missing_test.go; to add it:\n\tgo get a/missing_test.g'
     'o'),
    ('hard_malformed_search', "rg 'foo(' src | head", 0,
     'rg: regex parse error:\n    (?:foo()\n    ^\nerror: unclosed group'),
    ('hard_malformed_search', "grep -E 'a(b' -r .", 2, 'grep: Unmatched ( or \\('),
    ('hard_malformed_search', "grep -rn '\\(' .", 2, 'grep: Unmatched ( or \\('),
    ('hard_malformed_search', "grep -rn -- '*\\' .", 2, 'grep: Trailing backslash'),
    ('hard_malformed_search', "git grep 'a['", 128, "fatal: command line, 'a[': Unmatched [, [^, [:, [., or [="),
    ('hard_malformed_search', 'rg --type-foo x', 2,
     'rg: unrecognized flag --type-foo, similar flags that are available: --type-not'),
    ('hard_malformed_search', "rg '(?<=a+)b'", 2,
     'regex parse error:\n    (?<=a+)b\n    ^^^^\nerror: look-around, including look-ahead and look'
     '-behind, is not supported'),
    ('hard_malformed_search', 'rg -A foo', 2,
     'rg: error parsing flag -A: value is not a valid number: invalid digit found in string'),
    ('hard_malformed_search', 'rg', 2, 'error: The following required arguments were not provided:\n    <PATTERN>'),
    ('hard_malformed_search', 'find . -name *.py', 1,
     "find: paths must precede expression: `b.py'\nfind: possible unquoted pattern after predicat"
     "e `-name'?"),
    ('hard_malformed_search', 'find . -foo', 1, "find: unknown predicate `-foo'"),
    ('hard_malformed_search', 'find . -maxdepth x', 1,
     'find: Expected a positive decimal integer argument to -maxdepth, but got ‘x’'),
    ('hard_malformed_search', "grep -rn 'a\\{1' .", 2, 'grep: Unmatched \\{'),
    ('hard_malformed_search', "grep -P '(' x", 2, 'grep: missing closing parenthesis'),
    ('hard_malformed_search', "grep -P '[b-a]' x", 2, 'grep: range out of order in character class'),
    ('hard_malformed_search', "grep -rnE '*{' .", 2, 'grep: Invalid preceding regular expression'),
    ('hard_malformed_search', 'grep -e', 2,
     "grep: option requires an argument -- 'e'\nUsage: grep [OPTION]... PATTERNS [FILE]..."),
    ('hard_malformed_search', 'egrep -Z1 a', 2, "egrep: invalid option -- '1'"),
    ('hard_malformed_search', "grep -rn 'it's' .", 2,
     "bash: -c: line 1: unexpected EOF while looking for matching `''\nbash: -c: line 2: syntax e"
     'rror: unexpected end of file'),
    ('hard_go_toolchain_env', 'go build ./...', 1,
     "go: errors parsing go.mod:\n/r/go.mod:3: invalid go version '1.21.0': must match format 1.2"
     '3'),
    ('hard_go_toolchain_env', 'go mod tidy', 1,
     'go: module golang.org/x/tools@v0.30 requires go >= 1.23.0 (running go 1.22.12; GOTOOLCHAIN'
     '=local)'),
    ('hard_go_toolchain_env', 'go build ./...', 1, '# x\n./a.go:3:4: undefined: min\nnote: module requires Go 1.21'),
    ('hard_go_toolchain_env', 'go vet ./...', 1,
     'go: go.mod file indicates go 1.24, but maximum version supported by tidy is 1.22'),
    ('hard_go_toolchain_env', 'go build ./...', 1,
     'a.go:3:2: package log/slog is not in std (/usr/lib/go-1.19/src/log/slog)'),
    ('hard_go_toolchain_env', 'go test ./...', 127, 'sh: 1: go: not found'),
    ('hard_go_toolchain_env', 'go test ./...', 127, '/bin/sh: go: command not found'),
    ('hard_go_toolchain_env', 'go build', 1, 'go: cannot find "go1.99" in PATH'),
    ('hard_go_toolchain_env', 'go build -race', 2, 'go: -race requires cgo; enable cgo by setting CGO_ENABLED=1'),
    ('hard_go_toolchain_env', 'go test ./x', 1,
     '# runtime/cgo\ncgo: C compiler "gcc" not found: exec: "gcc": executable file not found in $'
     'PATH'),
    ('hard_go_fmt_cross_dir', 'go fmt a/a.go b/b.go && go test ./...', 1,
     'named files must all be in one directory; have a and b'),
    ('hard_go_fmt_cross_dir', '/usr/local/go/bin/go fmt a/a.go b/b.go', 1,
     'named files must all be in one directory; have a/ and b/'),
    ('hard_mockey_gcflags', 'go test ./pay 2>&1 | tail -5', 0,
     'Mockey check failed, please add -gcflags="all=-N -l".\n--- FAIL: TestUse (0.00s)\nFAIL'),
    ('hard_mockey_gcflags', 'go test -gcflags=-l ./pay', 1,
     'panic: Mockey check failed, please add -gcflags="all=-N -l".\nFAIL\tx 0.1s'),
    ('hard_mockey_gcflags', 'go test -v ./pay', 1,
     '--- FAIL: TestUse (0.00s)\npanic: function not mockable, from github.com/bytedance/mockey.M'
     'ock\nFAIL'),
    ('hard_semantic_search_auth', 'gh search code foo', 4,
     'gh: To get started with GitHub CLI, please run:  gh auth login'),
    ('hard_semantic_search_auth', 'curl -sS -f http://s/401/search', 22,
     'curl: (22) The requested URL returned error: 401'),
    ('hard_semantic_search_auth', 'curl -sS http://s/403/search', 0,
     '{"error":"forbidden","message":"identity not recognised"}'),
    ('hard_semantic_search_auth', "src search 'repo:x foo'", 1, 'error: 401 Unauthorized\n\nInvalid access token.'),
    ('hard_semantic_search_auth', 'git clone http://s/403/r.git', 128,
     "fatal: unable to access 'http://s/403/r.git/': The requested URL returned error: 403"),
    ('hard_semantic_search_auth', 'git ls-remote http://s/r.git', 128,
     "remote: Unauthorized\nfatal: Authentication failed for 'http://s/r.git/'"),
    ('hard_semantic_search_auth', 'gh api search/code', 1,
     '{"message":"Bad credentials","status":"401"}\ngh: Bad credentials (HTTP 401)'),
    ('hard_semantic_search_auth', 'wget -q http://s/401', 6, 'Username/Password Authentication Failed.'),
    (None, 'go test ./...', 1, '--- FAIL: TestX (0.00s)\n    x_test.go:5: want 1\nFAIL'),
    (None, "grep -rn 'Multiple occurrences of' .", 0, 'a.py:1:Multiple occurrences of x'),
    (None, 'cat README.md', 0, 'go: go.mod requires go >= 1.30'),
    (None, 'python app.py', 1, 'requests.exceptions.ConnectionError: HTTPConnectionPool'),
    (None, 'rg foo', 1, ''),
    (None, 'find . -name x', 0, ''),
    (None, 'pytest -q', 1, "E   FileNotFoundError: [Errno 2] No such file or directory: 'data.txt'\n1 failed"),
    (None, 'go test ./a', 1, 'panic: open x: no such file or directory\nFAIL\tx 0.1s'),
    (None, 'ls', 0, 'a'),
    (None, 'cargo test', 101, 'error[E0425]: cannot find value `x` in this scope\n --> src/lib.rs:3:4'),
    (None, 'npm test', 1, 'FAIL a.test.js\n  expect(received).toBe(expected)'),
    (None, 'git push', 128, "fatal: 'origin' does not appear to be a git repository"),
    (None, 'pytest', 0, '1 passed'),
    (None, "python -c 'print(1)'", 1, "Traceback: KeyError: 'token'"),
    (None, 'go vet ./...', 1, '# x\n./a.go:5:2: fmt.Printf format %d has arg s of wrong type string'),
]
TOOLS = [  # (rule or None, tool, arguments, error flag, output)
    ('hard_missing_file_path_narrow', 'Write', {'file_path': '/r/x'}, True,
     "ENOENT: no such file or directory, open '/r/x'"),
    ('hard_missing_file_path_narrow', 'LS', {'path': '/r/x'}, True,
     "Error: ENOENT: no such file or directory, scandir '/r/x'"),
    ('hard_malformed_search', 'Grep', {'pattern': 'interface{}'}, False, 'No files found'),
    ('hard_malformed_search', 'Grep', {'pattern': 'foo('}, True, 'rg: regex parse error:\n    (?:foo()'),
    ('hard_ambiguous_edit_old_string', 'str_replace_based_edit_tool', {'command': 'str_replace', 'path': 'a'}, True,
     'No replacement was performed. Multiple occurrences of old_str `x` in lines [1, 2]. Please '
     'ensure it is unique'),
    ('hard_ambiguous_edit_old_string', 'MultiEdit', {'file_path': 'a'}, True,
     'Found 3 matches of the string to replace, but replace_all is false.'),
    ('hard_ambiguous_edit_old_string', 'str_replace_editor', {'command': 'str_replace', 'path': 'a'}, False,
     'No replacement was performed. Multiple occurrences of old_str `x` in lines [1, 2]. Please '
     'ensure it is unique'),
    ('hard_ambiguous_edit_old_string', 'str_replace_editor', {'command': 'str_replace', 'path': 'a'}, False,
     "ERROR: Multiple occurrences of 'x' found in a. Please ensure it is unique before using str"
     '_replace.'),
    ('hard_semantic_search_auth', 'mcp__code_search', {'query': 'x'}, True, 'Error: 401 Unauthorized'),
    ('hard_semantic_search_auth', 'semantic_search', {'query': 'x'}, False, 'authentication failed: token expired'),
    ('hard_semantic_search_auth', 'WebFetch', {'url': 'x'}, True, 'Request failed with status code 403'),
    ('hard_noisy_validation_output_narrow', 'Bash', {'command': 'npx jest'}, True,
     'Exit code 1\nFAIL a\n\n... [20012 characters truncated] ...\n\nTests: 1 failed'),
    ('hard_noisy_validation_output_narrow', 'Bash', {'command': 'pytest -q'}, True,
     'FF\n\n... [137 lines truncated] ...'),
    ('hard_noisy_validation_output_narrow', 'Bash', {'command': 'go test -v ./noisy'}, True,
     '<persisted-output>\nOutput too large (92.8KB). Full output saved to: /x\n\nPreview (first 2KB'
     '):\n=== RUN\n...\n</persisted-output>'),
    (None, 'Read', {'file_path': 'a'}, False, '1\tgrep: Unmatched [\n2\tFile does not exist'),
]


@pytest.mark.parametrize("rule, command, exit_code, output", BASH)
def test_a_shell_command_fires_its_rule_and_nothing_fires_on_the_others(rule, command, exit_code, output):
    fired = matches("bash", {"command": command}, exit_code, False, output)
    assert rule in fired if rule else not fired


@pytest.mark.parametrize("rule, tool, arguments, is_error, output", TOOLS)
def test_a_tool_call_fires_its_rule_and_nothing_fires_on_the_others(rule, tool, arguments, is_error, output):
    fired = matches(tool, arguments, None, is_error, output)
    assert rule in fired if rule else not fired
