// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-iommu. The bytes of bounce windows are not in it: they are beside the guest's RAM, and come after
//! the state, by [`IommuHandle::with_window_chunk`](super::IommuHandle::with_window_chunk).

use iommu_bounce::{Engine, EngineState};

use crate::state::{DeviceState, StateError};
use crate::windows::WindowMemory;

/// Kind and version. The engine's state has a version of its own.
const STATE: (&str, u32) = ("iommu", 1);

/// What the engine holds.
pub(super) fn save(engine: &Engine) -> Result<DeviceState, StateError> {
    DeviceState::new(STATE.0, STATE.1, &engine.state())
}

/// Makes an engine that was just made or reset, and the memory of its windows, what `state` says.
///
/// # Errors
/// What of the state is refused. Engine and windows are as after a reset then.
pub(super) fn restore(
    engine: &mut Engine,
    windows: Option<&WindowMemory>,
    state: &DeviceState,
) -> Result<(), StateError> {
    let state: EngineState = state.payload(STATE.0, STATE.1)?;
    let budget = state.window.map_or(0, |window| window.budget);
    if let Some(windows) = windows {
        // A budget that was lowered leaves what is backed.
        let needed = state.window_bytes(engine.chunk_size()).min(windows.region_size());
        windows.set_budget(budget.max(needed));
    }
    let restored = engine.restore(&state);
    if let Some(windows) = windows {
        windows.set_budget(if restored.is_ok() { budget } else { engine.budget() });
    }
    restored.map_err(|error| StateError::rule("engine", error.to_string()))
}
