# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Check for scripts/test api that replaces schemathesis' not_a_server_error.

A call that is not possible in the VM's current state gets status 500, as the API's clients expect. Any other 500 is a failure of the server.
"""

import re

import schemathesis

# Texts of ControlError::WrongState and ControlError::AlreadyCreated.
WRONG_STATE = re.compile(r"the VM is (created, but not booted|running|paused|shut down): vmm?\.[a-z-]+ needs a VM that is .+")
ALREADY_CREATED = "a VM is already created: delete it first (vm.delete)"
# Description of status 500 for an operation that no state refuses.
NO_STATE = "An operation of the host failed."


@schemathesis.check
def server_error_is_a_refusal_for_the_state(ctx, response, case):
    if response.status_code < 500:
        return
    said = f"{response.status_code}: {response.content[:1000]!r}"
    assert response.status_code == 500, said
    try:
        [message] = response.json()
    except ValueError:
        raise AssertionError(f"the answer is not a list of one message: {said}") from None
    documented = case.operation.definition.raw["responses"]["500"]["description"]
    if message == ALREADY_CREATED:
        assert "A VM already exists." in documented, f"the document does not describe this answer: {said}"
    else:
        assert WRONG_STATE.fullmatch(message), f"the server failed: {said}"
        assert documented != NO_STATE, f"the document does not describe this answer: {said}"
