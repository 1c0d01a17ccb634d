// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-iommu. The state does not contain the bytes of bounce windows. The VMM saves these bytes with the guest's RAM.
//! After the state is restored, the VMM restores the bytes through
//! [`IommuHandle::with_window_chunk`](super::IommuHandle::with_window_chunk).

use iommu_bounce::{Engine, EngineState};

use crate::state::{DeviceState, StateError};
use crate::windows::WindowMemory;

/// Kind and version of the state. The engine's state has its own version.
const STATE: (&str, u32) = ("iommu", 1);

/// Returns the state of the engine.
pub(super) fn save(engine: &Engine) -> Result<DeviceState, StateError> {
    DeviceState::new(STATE.0, STATE.1, &engine.state())
}

/// Restores `state` to `engine` and to the memory of its windows. The engine must be new or just reset.
///
/// # Errors
/// The engine rejects a part of the state. The engine and the windows are then in the reset state.
pub(super) fn restore(
    engine: &mut Engine,
    windows: Option<&WindowMemory>,
    state: &DeviceState,
) -> Result<(), StateError> {
    let state: EngineState = state.payload(STATE.0, STATE.1)?;
    let budget = state.window.map_or(0, |window| window.budget);
    if let Some(windows) = windows {
        // The saved state may have more chunks than its budget allows, if the budget was lowered. Allow these chunks during the restore.
        let needed = state.window_bytes(engine.chunk_size()).min(windows.region_size());
        windows.set_budget(budget.max(needed));
    }
    let restored = engine.restore(&state);
    if let Some(windows) = windows {
        windows.set_budget(if restored.is_ok() { budget } else { engine.budget() });
    }
    restored.map_err(|error| StateError::rule("engine", error.to_string()))
}
