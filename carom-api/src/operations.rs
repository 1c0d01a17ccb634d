// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of operations: what the server serves and the OpenAPI document describes.

use std::sync::LazyLock;

use crate::body::{self, Unknown};
use crate::call::Call;
use crate::config::ConsoleMode;
use crate::error::{ConfigError, Explain};
use crate::field::Terms;
use crate::kinds::{Add, ConsoleConfig, KINDS, Kind};
use crate::types::VmRemoveDevice;
use crate::vm_config::VmConfig;

/// Where all paths start.
pub const ROOT: &str = "/api/v1/";

/// Path of the metrics.
pub const METRICS: &str = "/metrics";
/// Media type of the metrics, Prometheus' text form.
pub const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How an operation is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// GET.
    Get,
    /// PUT.
    Put,
}

impl Verb {
    /// Its name in HTTP.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
        }
    }
}

/// Why a body is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct BodyError {
    /// One line in the words of JSON.
    pub message: String,
    /// Two devices have something that no two may.
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

/// What an operation does.
pub enum Action {
    /// Answers with what the VMM is, without asking the control thread.
    Ping,
    /// Answers with the OpenAPI document.
    Document,
    /// Asks the control thread what is the case, which changes nothing.
    Read(fn() -> Call),
    /// Asks the control thread, with a call that takes no body.
    Plain(fn() -> Call),
    /// Asks the control thread, with a call made of the body.
    WithBody(fn(&[u8]) -> Result<Call, BodyError>),
    /// Asks the control thread to add a device of this kind, which the body describes.
    AddDevice(&'static Kind),
}

impl Action {
    /// The call that comes of `body`.
    ///
    /// # Errors
    /// One line in the words of JSON: the body is none that the action takes, which may take none.
    pub fn read(&self, body: &[u8]) -> Result<Call, BodyError> {
        match self {
            Self::WithBody(read) => read(body),
            Self::AddDevice(kind) => Ok(kind.read(body).map(Call::AddDevice)?),
            Self::Ping | Self::Document | Self::Read(_) | Self::Plain(_) => Err(String::from("takes no body").into()),
        }
    }
}

/// What an operation answers with when all went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Success {
    /// 204, no body.
    Nothing,
    /// 200 with a body of this schema.
    Body(&'static str),
    /// 200 with a body of this schema where the VM is booted, otherwise 204.
    BodyIfBooted(&'static str),
    /// 200 with a JSON document.
    Document,
    /// 200 with text.
    Text,
}

/// An operation of the API.
pub struct Operation {
    /// How it is asked for.
    pub verb: Verb,
    /// Its path, behind [`ROOT`] unless it starts with a slash.
    pub name: &'static str,
    /// Its name in the document and in clients generated from it.
    pub id: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// Schema of the body it takes.
    pub request: Option<&'static str>,
    /// What it answers with.
    pub success: Success,
    /// Why it may be refused, by status. What all calls have in common is not among them.
    pub refusals: &'static [(u16, &'static str)],
    /// What it does.
    pub action: Action,
}

const NOT_CREATED: (u16, &str) = (404, "No VM is created.");
const NOT_BOOTED: (u16, &str) = (500, "The VM is not booted.");

fn create(bytes: &[u8]) -> Result<Call, BodyError> {
    let mut config: VmConfig = body::parse_config(bytes, Unknown::Ignored)?;
    config.console.get_or_insert(ConsoleConfig::of(ConsoleMode::Tty));
    Ok(Call::Create(Box::new(config.check()?)))
}

/// An operation that takes and answers nothing.
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

/// An operation that tells something and changes nothing.
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

/// An operation that takes a body of the schema `request`, and answers nothing.
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
    /// Its whole path.
    pub fn path(&self) -> String {
        if self.name.starts_with('/') { self.name.into() } else { format!("{ROOT}{}", self.name) }
    }
}

/// All operations.
pub fn all() -> impl Iterator<Item = &'static Operation> {
    static OF_KINDS: LazyLock<Vec<Operation>> =
        LazyLock::new(|| KINDS.iter().filter_map(|kind| Some(adding(kind, kind.add.as_ref()?))).collect());
    OPERATIONS.iter().chain(OF_KINDS.iter())
}

/// The operation that adds a device of this kind.
fn adding(kind: &'static Kind, add: &Add) -> Operation {
    Operation {
        verb: Verb::Put,
        name: add.operation,
        id: add.id,
        summary: add.summary,
        request: Some(add.schema),
        success: Success::BodyIfBooted("PciDeviceInfo"),
        refusals: &[NOT_CREATED, (409, "A device has this ID or path already.")],
        action: Action::AddDevice(kind),
    }
}

/// Those that do not belong to a kind of device.
static OPERATIONS: &[Operation] = &[
    get(
        "vmm.ping",
        "pingVMM",
        "Tells what the VMM is. Answered at once, whatever the VM does.",
        Success::Body("VmmPing"),
        &[],
        Action::Ping,
    ),
    plain("vmm.shutdown", "shutdownVMM", "Deletes the VM and ends the VMM.", &[], || Call::ShutdownVmm),
    put(
        "vm.create",
        "createVM",
        "Keeps the configuration of a VM. Nothing is built from it before vm.boot.",
        "VmConfig",
        &[(409, "Two devices have the same ID or path."), (500, "A VM is created already.")],
        create,
    ),
    plain("vm.delete", "deleteVM", "Shuts the VM down and forgets its configuration.", &[], || Call::Delete),
    plain(
        "vm.boot",
        "bootVM",
        "Builds the VM and starts the guest.",
        &[
            (400, "A file or device of the configuration cannot be used."),
            NOT_CREATED,
            (500, "The VM is booted already."),
        ],
        || Call::Boot,
    ),
    plain(
        "vm.shutdown",
        "shutdownVM",
        "Ends the guest at once and gives its devices back. The configuration stays.",
        &[NOT_CREATED, NOT_BOOTED],
        || Call::Shutdown,
    ),
    plain("vm.reboot", "rebootVM", "Resets the guest.", &[NOT_CREATED, NOT_BOOTED], || Call::Reboot),
    plain(
        "vm.pause",
        "pauseVM",
        "Stops the vCPUs. The devices' DMA goes on.",
        &[NOT_CREATED, (500, "The VM does not run.")],
        || Call::Pause,
    ),
    plain("vm.resume", "resumeVM", "Lets the vCPUs go on.", &[NOT_CREATED, (500, "The VM is not paused.")], || {
        Call::Resume
    }),
    plain("vm.power-button", "power-buttonVM", "Presses the guest's power button.", &[NOT_CREATED, NOT_BOOTED], || {
        Call::PowerButton
    }),
    plain(
        "vmm.nmi",
        "vmm-nmi",
        "The same as vm.nmi: clients made from older descriptions of Cloud Hypervisor's API know it by this name.",
        &[NOT_CREATED, NOT_BOOTED],
        || Call::Nmi,
    ),
    plain("vm.nmi", "nmiVM", "Raises an NMI on every vCPU.", &[NOT_CREATED, NOT_BOOTED], || Call::Nmi),
    get(
        "vm.info",
        "infoVM",
        "Tells what the VM is.",
        Success::Body("VmInfo"),
        &[NOT_CREATED],
        Action::Read(|| Call::Info),
    ),
    get(
        "vm.counters",
        "countersVM",
        "Tells the counters of the VM's devices.",
        Success::Body("VmCounters"),
        &[NOT_CREATED, NOT_BOOTED],
        Action::Read(|| Call::Counters),
    ),
    get(
        "vm.iommu-bounce",
        "iommuBounceVM",
        "Tells what the bounce windows may use and do use, with all figures of the virtio-iommu.",
        Success::Body("IommuBounceReport"),
        &[(404, "No VM is created, or it has no bounce windows.")],
        Action::Read(|| Call::Bounce),
    ),
    put(
        "vm.iommu-bounce",
        "tuneIommuBounceVM",
        "Changes what the bounce windows may use, and what the guest may have mapped beside them; a running guest follows.",
        "IommuBounceChange",
        &[(404, "No VM is created, or it has no bounce windows.")],
        |bytes| Ok(body::parse(bytes).map(Call::TuneBounce)?),
    ),
    get("openapi.json", "openapi", "This document.", Success::Document, &[], Action::Document),
    get(METRICS, "metrics", "Figures in Prometheus' text form.", Success::Text, &[], Action::Read(|| Call::Figures)),
    put(
        "vm.resize",
        "resizeVM",
        "Changes vCPUs and RAM of a VM, for the next boot or while it runs. vCPUs leave when the guest lets go of them.",
        "VmResize",
        &[NOT_CREATED, (429, "A vCPU that is wanted back is about to leave.")],
        |bytes| Ok(body::parse(bytes).map(Call::Resize)?),
    ),
    put(
        "vm.resize-disk",
        "resizeDiskVM",
        "Changes the size of a disk of a VM that is booted, and of the file that is its image. The guest is told.",
        "VmResizeDisk",
        &[(400, "The image cannot have this size."), (404, "No VM is created, or it has no such disk."), NOT_BOOTED],
        |bytes| Ok(body::parse(bytes).map(Call::ResizeDisk)?),
    ),
    put(
        "vm.snapshot",
        "snapshotVM",
        "Saves a paused VM to a directory. It stays paused.",
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
        "Makes the VM that was saved to a directory. It is paused, unless it is to be resumed.",
        "RestoreConfig",
        &[
            (400, "The directory is no snapshot that this VMM reads, or this host cannot be what the VM's was."),
            (500, "A VM is created already."),
        ],
        |bytes| Ok(body::parse(bytes).map(Call::Restore)?),
    ),
    put(
        "vm.remove-device",
        "removeDeviceVM",
        "Takes a device away; a running guest is asked to let go of it.",
        "VmRemoveDevice",
        &[
            (404, "No VM is created, or it has no such device."),
            (500, "The VM is booted, and the device is there from its start."),
        ],
        |bytes| Ok(body::parse(bytes).map(|device: VmRemoveDevice| Call::RemoveDevice(device.id))?),
    ),
];

/// The operations at `path`, one for each verb.
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
        assert_eq!(error, "payload.kernel: is missing, and payload.firmware too: one of them is what boots");
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
