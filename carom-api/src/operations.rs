// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Table of operations, which the server serves and the OpenAPI document describes.

use std::sync::LazyLock;

use crate::body::{self, Unknown};
use crate::call::Call;
use crate::config::ConsoleMode;
use crate::error::{ConfigError, Explain};
use crate::field::Terms;
use crate::kinds::{Add, ConsoleConfig, KINDS, Kind};
use crate::types::VmRemoveDevice;
use crate::vm_config::VmConfig;

/// Prefix of all paths of operations.
pub const ROOT: &str = "/api/v1/";

/// Path of the metrics.
pub const METRICS: &str = "/metrics";
/// Media type of the metrics: the text format of Prometheus.
pub const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// HTTP method of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET.
    Get,
    /// PUT.
    Put,
}

impl Verb {
    /// Returns the name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
        }
    }
}

/// Reason why a body is rejected.
#[derive(Debug, PartialEq, Eq)]
pub struct BodyError {
    /// Text of one line, which names fields as in JSON.
    pub message: String,
    /// True if two devices have the same ID, path or other value that must be unique.
    pub conflict: bool,
}

impl From<String> for BodyError {
    fn from(message: String) -> Self {
        Self { message, conflict: false }
    }
}

impl From<ConfigError> for BodyError {
    fn from(error: ConfigError) -> Self {
        Self { message: error.explain(Terms::Json), conflict: error.is_conflict() }
    }
}

/// Implementation of an operation.
pub enum Action {
    /// Describe the VMM, without asking the control thread.
    Ping,
    /// Return the OpenAPI document.
    Document,
    /// Send the control thread a call that only reads state.
    Read(fn() -> Call),
    /// Send the control thread a call without a body.
    Plain(fn() -> Call),
    /// Send the control thread a call made from the body.
    WithBody(fn(&[u8]) -> Result<Call, BodyError>),
    /// Ask the control thread to add a device of this kind, configured by the body.
    AddDevice(&'static Kind),
}

impl Action {
    /// Returns the call for `body`.
    ///
    /// # Errors
    /// One line, which names fields as in JSON: the body is malformed or breaks a rule, or the action takes no body.
    pub fn read(&self, body: &[u8]) -> Result<Call, BodyError> {
        match self {
            Self::WithBody(read) => read(body),
            Self::AddDevice(kind) => Ok(kind.read(body).map(Call::AddDevice)?),
            Self::Ping | Self::Document | Self::Read(_) | Self::Plain(_) => Err(String::from("takes no body").into()),
        }
    }
}

/// Successful answer of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Success {
    /// Status 204 without a body.
    Nothing,
    /// Status 200 with a body of this schema.
    Body(&'static str),
    /// If the VM is booted, status 200 with a body of this schema. Otherwise status 204 without a body.
    BodyIfBooted(&'static str),
    /// Status 200 with a JSON document.
    Document,
    /// Status 200 with text.
    Text,
}

/// An operation of the API.
pub struct Operation {
    /// HTTP method.
    pub verb: Verb,
    /// Path below [`ROOT`], or an absolute path if it starts with a slash.
    pub name: &'static str,
    /// Operation ID in the document, which generated clients use.
    pub id: &'static str,
    /// Summary in one line.
    pub summary: &'static str,
    /// Schema of the request body, if the operation takes one.
    pub request: Option<&'static str>,
    /// Successful answer.
    pub success: Success,
    /// Reasons for an error, with their status codes. Reasons that all operations have in common are not listed.
    pub refusals: &'static [(u16, &'static str)],
    /// Implementation.
    pub action: Action,
}

const NOT_CREATED: (u16, &str) = (404, "No VM has been created.");
const NOT_BOOTED: (u16, &str) = (500, "The VM is not booted.");

fn create(bytes: &[u8]) -> Result<Call, BodyError> {
    let mut config: VmConfig = body::parse_config(bytes, Unknown::Ignored)?;
    config.console.get_or_insert(ConsoleConfig::of(ConsoleMode::Tty));
    Ok(Call::Create(Box::new(config.check()?)))
}

/// Returns an operation without a request body and without a response body.
const fn plain(
    name: &'static str,
    id: &'static str,
    summary: &'static str,
    refusals: &'static [(u16, &'static str)],
    call: fn() -> Call,
) -> Operation {
    let (verb, request, success) = (Verb::Put, None, Success::Nothing);
    Operation { verb, name, id, summary, request, success, refusals, action: Action::Plain(call) }
}

/// Returns an operation that reads state.
const fn get(
    name: &'static str,
    id: &'static str,
    summary: &'static str,
    success: Success,
    refusals: &'static [(u16, &'static str)],
    action: Action,
) -> Operation {
    Operation { verb: Verb::Get, name, id, summary, request: None, success, refusals, action }
}

/// Returns an operation with a request body of the schema `request`, and without a response body.
const fn put(
    name: &'static str,
    id: &'static str,
    summary: &'static str,
    request: &'static str,
    refusals: &'static [(u16, &'static str)],
    read: fn(&[u8]) -> Result<Call, BodyError>,
) -> Operation {
    let (request, success, action) = (Some(request), Success::Nothing, Action::WithBody(read));
    Operation { verb: Verb::Put, name, id, summary, request, success, refusals, action }
}

impl Operation {
    /// Returns the full path.
    pub fn path(&self) -> String {
        if self.name.starts_with('/') { self.name.into() } else { format!("{ROOT}{}", self.name) }
    }
}

/// Returns all operations.
pub fn all() -> impl Iterator<Item = &'static Operation> {
    static OF_KINDS: LazyLock<Vec<Operation>> =
        LazyLock::new(|| KINDS.iter().filter_map(|kind| Some(adding(kind, kind.add.as_ref()?))).collect());
    OPERATIONS.iter().chain(OF_KINDS.iter())
}

/// Returns the operation that adds a device of this kind.
fn adding(kind: &'static Kind, add: &Add) -> Operation {
    Operation {
        verb: Verb::Put,
        name: add.operation,
        id: add.id,
        summary: add.summary,
        request: Some(add.schema),
        success: Success::BodyIfBooted("PciDeviceInfo"),
        refusals: &[NOT_CREATED, (409, "Another device already has this ID or path.")],
        action: Action::AddDevice(kind),
    }
}

/// Operations that do not belong to a device kind.
static OPERATIONS: &[Operation] = &[
    get(
        "vmm.ping",
        "pingVMM",
        "Returns version and features of the VMM. Answers immediately, even during another operation.",
        Success::Body("VmmPing"),
        &[],
        Action::Ping,
    ),
    plain("vmm.shutdown", "shutdownVMM", "Deletes the VM and ends the VMM.", &[], || Call::ShutdownVmm),
    put(
        "vm.create",
        "createVM",
        "Creates a VM from a configuration. The VM is built only by vm.boot.",
        "VmConfig",
        &[(409, "Two devices have the same ID or path."), (500, "A VM already exists.")],
        create,
    ),
    plain("vm.delete", "deleteVM", "Shuts the VM down and deletes its configuration.", &[], || Call::Delete),
    plain(
        "vm.boot",
        "bootVM",
        "Builds the VM and starts the guest.",
        &[
            (400, "A file or device of the configuration cannot be used."),
            NOT_CREATED,
            (500, "The VM is already booted."),
        ],
        || Call::Boot,
    ),
    plain(
        "vm.shutdown",
        "shutdownVM",
        "Stops the guest immediately and releases its devices. The configuration stays.",
        &[NOT_CREATED, NOT_BOOTED],
        || Call::Shutdown,
    ),
    plain("vm.reboot", "rebootVM", "Resets the guest.", &[NOT_CREATED, NOT_BOOTED], || Call::Reboot),
    plain(
        "vm.pause",
        "pauseVM",
        "Stops the vCPUs. DMA of passed-through devices continues.",
        &[NOT_CREATED, (500, "The VM does not run.")],
        || Call::Pause,
    ),
    plain("vm.resume", "resumeVM", "Resumes the vCPUs.", &[NOT_CREATED, (500, "The VM is not paused.")], || {
        Call::Resume
    }),
    plain("vm.power-button", "power-buttonVM", "Presses the guest's power button.", &[NOT_CREATED, NOT_BOOTED], || {
        Call::PowerButton
    }),
    plain(
        "vmm.nmi",
        "vmm-nmi",
        "Raises an NMI on every vCPU. Older name of vm.nmi in Cloud Hypervisor's API.",
        &[NOT_CREATED, NOT_BOOTED],
        || Call::Nmi,
    ),
    plain("vm.nmi", "nmiVM", "Raises an NMI on every vCPU.", &[NOT_CREATED, NOT_BOOTED], || Call::Nmi),
    get(
        "vm.info",
        "infoVM",
        "Returns configuration, state and devices of the VM.",
        Success::Body("VmInfo"),
        &[NOT_CREATED],
        Action::Read(|| Call::Info),
    ),
    get(
        "vm.counters",
        "countersVM",
        "Returns the counters of the VM's devices.",
        Success::Body("VmCounters"),
        &[NOT_CREATED, NOT_BOOTED],
        Action::Read(|| Call::Counters),
    ),
    get(
        "vm.iommu-bounce",
        "iommuBounceVM",
        "Returns limits and usage of the bounce windows, with all figures of the virtio-iommu.",
        Success::Body("IommuBounceReport"),
        &[(404, "No VM has been created, or the VM has no bounce windows.")],
        Action::Read(|| Call::Bounce),
    ),
    put(
        "vm.iommu-bounce",
        "tuneIommuBounceVM",
        "Changes the limits of the bounce windows and of other mappings. Takes effect in a running guest.",
        "IommuBounceChange",
        &[(404, "No VM has been created, or the VM has no bounce windows.")],
        |bytes| Ok(body::parse(bytes).map(Call::TuneBounce)?),
    ),
    get("openapi.json", "openapi", "This document.", Success::Document, &[], Action::Document),
    get(METRICS, "metrics", "Metrics in Prometheus' text format.", Success::Text, &[], Action::Read(|| Call::Figures)),
    put(
        "vm.resize",
        "resizeVM",
        "Changes the vCPUs, RAM or balloon of a VM, for the next boot or in the running guest. A vCPU is removed when the guest releases the vCPU.",
        "VmResize",
        &[NOT_CREATED, (429, "A requested vCPU is still being removed.")],
        |bytes| Ok(body::parse(bytes).map(Call::Resize)?),
    ),
    put(
        "vm.resize-disk",
        "resizeDiskVM",
        "Changes the size of a disk of a booted VM, and of its image file. The guest is notified.",
        "VmResizeDisk",
        &[
            (400, "The image cannot have this size."),
            (404, "No VM has been created, or the VM has no such disk."),
            NOT_BOOTED,
        ],
        |bytes| Ok(body::parse(bytes).map(Call::ResizeDisk)?),
    ),
    put(
        "vm.snapshot",
        "snapshotVM",
        "Saves a paused VM to a directory. The VM stays paused.",
        "VmSnapshotConfig",
        &[
            (400, "The directory cannot be used, or a device of the VM cannot be saved."),
            NOT_CREATED,
            (500, "The VM is not paused."),
        ],
        |bytes| Ok(body::parse(bytes).map(Call::Snapshot)?),
    ),
    put(
        "vm.restore",
        "restoreVM",
        "Restores a VM from a snapshot directory. The VM is paused unless resume is true.",
        "RestoreConfig",
        &[
            (
                400,
                "This VMM cannot read the directory as a snapshot, or this host lacks something that the saved VM needs.",
            ),
            (500, "A VM already exists."),
        ],
        |bytes| Ok(body::parse(bytes).map(Call::Restore)?),
    ),
    put(
        "vm.remove-device",
        "removeDeviceVM",
        "Removes a device. A running guest is asked to release the device.",
        "VmRemoveDevice",
        &[
            (404, "No VM has been created, or the VM has no such device."),
            (500, "The VM is booted, and the device cannot be hot-unplugged."),
        ],
        |bytes| Ok(body::parse(bytes).map(|device: VmRemoveDevice| Call::RemoveDevice(device.id))?),
    ),
];

/// Returns the operations at `path`, one for each method.
pub fn at(path: &str) -> impl Iterator<Item = &'static Operation> {
    let name = path.strip_prefix(ROOT).unwrap_or(path);
    let absolute = name.len() == path.len();
    all().filter(move |operation| operation.name == name && name.starts_with('/') == absolute)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn operations_are_unique_and_found_by_their_path() {
        let mut ids = BTreeSet::new();
        for operation in all() {
            assert!(ids.insert(operation.id), "{}", operation.id);
            let path = operation.path();
            assert_eq!(at(&path).filter(|found| found.verb == operation.verb).count(), 1, "{path}");
        }
        for path in [
            "",
            "/",
            "vm.info",
            "/api/v1",
            "/api/v1/",
            "/api/v1/vm.info/",
            "/api/v2/vm.info",
            "/api/v1//metrics",
            "metrics",
        ] {
            assert_eq!(at(path).count(), 0, "{path}");
        }
    }

    #[test]
    fn body_of_a_call_is_checked_before_the_call_is_made() {
        assert!(create(br#"{"payload":{"kernel":"/k"}}"#).is_ok());
        assert!(create(br#"{"payload":{"firmware":"/f","kernel":null}}"#).is_ok());
        let error = create(br#"{"payload":{}}"#).unwrap_err().message;
        assert_eq!(error, "payload.kernel: is required unless payload.firmware is given");
        let error = create(br#"{"payload":{"kernel":"/k"},"memory":{"size":1}}"#).unwrap_err().message;
        assert!(error.starts_with("memory.size: "), "{error}");
        let error = create(br#"{"payload":{"kernel":"/k"},"devices":[{"path":"/d","id":"_x"}]}"#).unwrap_err().message;
        assert!(error.starts_with("devices.id: "), "{error}");
        let twice = create(br#"{"payload":{"kernel":"/k"},"devices":[{"path":"/d"},{"path":"/d"}]}"#).unwrap_err();
        assert!(twice.conflict && twice.message.starts_with("devices.path: "), "{twice:?}");
        let add = |name: &str, body: &str| {
            let operation = at(&format!("{ROOT}{name}")).next().unwrap();
            operation.action.read(body.as_bytes()).map(drop).map_err(|error| error.message)
        };
        assert_eq!(add("vm.add-device", r#"{"path":"/d","pci_segment":0}"#), Ok(()));
        assert!(add("vm.add-device", r#"{"path":"/d","pci_segment":-1}"#).unwrap_err().contains("pci_segment"));
        assert_eq!(add("vm.add-user-device", r#"{"socket":"/s","pci_segment":0}"#), Ok(()));
        let error = add("vm.add-user-device", r#"{"socket":"/s","id":""}"#).unwrap_err();
        assert!(error.starts_with("user_devices.id: "), "{error}");
    }
}
