# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A check of its own for scripts/test api, which takes the place of schemathesis' not_a_server_error.

A call that means nothing in the VM's state is answered with 500, as the API's clients expect. Any other 500 is a failure of the server.
"""

import re

import schemathesis

# The texts of ControlError::WrongState and ControlError::AlreadyCreated.
WRONG_STATE = re.compile(r"the VM is (created, but not booted|running|paused|shut down): vmm?\.[a-z-]+ needs it .+")
ALREADY_CREATED = "a VM is created already: delete it first (vm.delete)"
# What the document says of 500 where no state refuses the operation.
NO_STATE = "The host failed."


@schemathesis.check
def server_error_is_a_refusal_for_the_state(ctx, response, case):
    if response.status_code < 500:
        return
    said = f"{response.status_code}: {response.content[:1000]!r}"
    assert response.status_code == 500, said
    try:
        [message] = response.json()
    except ValueError:
        raise AssertionError(f"no list of one message: {said}") from None
    documented = case.operation.definition.raw["responses"]["500"]["description"]
    if message == ALREADY_CREATED:
        assert "A VM is created already." in documented, f"not documented: {said}"
    else:
        assert WRONG_STATE.fullmatch(message), f"the server failed: {said}"
        assert documented != NO_STATE, f"not documented: {said}"
