// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures of the VMMs themselves: start time, memory, size of the program, speed of the API.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use carom_integration::measure::statistics::median;
use carom_integration::workload::PRINT_VERSIONS;
use carom_integration::{Guest, Kernel, PROBE, Site, Vmm, api};
use carom_tools::children::KilledOnDrop;
use carom_tools::peers::Placeholder;
use serde_json::Value;

use crate::table::{self, LITTLE_RAM_MIB, Measured, Row, Scope, Shown, Table, Work, figure, ms, start_ms};

const SHOWN: &[Shown] = &[
    Shown::new("start_ms", "from the VMM's start to the guest's first program, in ms", 0),
    Shown::new("own_mib", "memory in addition to the guest's RAM, in MiB", 1),
    Shown::new("program_mib", "size of the program's file, in MiB", 1),
    Shown::new("api_ready_ms", "from the VMM's start to the first answer of its API, in ms", 1),
    Shown::new("api_us", "time of an API call, in µs", 0),
];

pub(crate) const TABLE: Table = Table::new("vmm", "vmm", SHOWN, work);

/// Number of measured API calls. The result is the median of their times.
const CALLS: usize = 200;

/// Maximum time until the API answers.
const API_TIME: Duration = Duration::from_secs(120);

/// Guest whose start is measured, and its VMM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    vmm: Vmm,
    devices: Devices,
    form: Form,
}

/// Devices of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Devices {
    None,
    /// One emulated device of each kind, and a VFIO drive behind the virtual IOMMU. With Carom, the drive also uses windows.
    Each,
}

impl Devices {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Each => "each",
        }
    }
}

/// File format of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Compressed kernel, which decompresses itself in the guest.
    BzImage,
    /// Uncompressed kernel, which the VMM starts by the PVH protocol.
    Vmlinux,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Self::BzImage => "bzImage",
            Self::Vmlinux => "vmlinux",
        }
    }

    fn kernel(self) -> Kernel {
        match self {
            Self::BzImage => Kernel::Patched,
            Self::Vmlinux => Kernel::PatchedElf,
        }
    }
}

impl Started {
    /// Returns all guests to compare at this site. Equal guests on different VMMs are adjacent.
    pub(crate) fn all(site: &Site) -> Vec<Self> {
        let vmms = [Vmm::Carom, Vmm::Base, Vmm::Qemu, Vmm::CloudHypervisor, Vmm::Other];
        let forms = [Form::BzImage, Form::Vmlinux];
        let guests = [Devices::None, Devices::Each].into_iter().flat_map(|devices| forms.map(|form| (devices, form)));
        let of = |(devices, form)| {
            let started = move |vmm: &Vmm| match vmm {
                Vmm::Other => devices == Devices::None && boots_other(site, form),
                _ => vmm.is_at(site) && (devices == Devices::None || is_told_alike(*vmm)),
            };
            vmms.into_iter().filter(started).map(move |vmm| Self { vmm, devices, form })
        };
        guests.flat_map(of).collect()
    }

    /// Returns the name of the work.
    pub(crate) fn name(self) -> String {
        format!("{} with {}, {}", self.vmm.name(), self.devices.name(), self.form.name())
    }

    /// Returns the keys of the row.
    pub(crate) fn keys(self) -> [(&'static str, Value); 4] {
        let Self { vmm, devices, form } = self;
        let name = |name: &str| Value::from(name);
        [
            ("vmm", name(vmm.name())),
            ("devices", name(devices.name())),
            ("kernel", name(form.name())),
            ("ram_mib", LITTLE_RAM_MIB.into()),
        ]
    }

    /// Returns a guest that runs `job`. The files of the guest's devices are in `dir`.
    pub(crate) fn guest(self, site: &Site, name: &str, job: &str, dir: &Path) -> Result<Guest> {
        let guest = Guest::new(name).vmm(self.vmm).kernel(self.form.kernel()).memory_mib(LITTLE_RAM_MIB).job(job);
        let mut guest = guest.look_every(Duration::from_millis(5));
        let mut arguments = Vec::new();
        if self.vmm == Vmm::CloudHypervisor {
            // All guests of Carom have an API socket and an event file. Guests of Cloud Hypervisor get both too, so that the
            // comparison is fair.
            for (option, file) in [("--api-socket", "api"), ("--event-monitor", "events")] {
                arguments.extend([option.into(), format!("path={}", dir.join(file).display())]);
            }
        }
        if self.devices == Devices::Each {
            arguments.extend(one_of_each(dir)?);
            guest = guest.iommu_device(&site.nvme[0]);
            if self.vmm.is_carom() {
                guest = guest.bounce("size=64M");
            }
        }
        Ok(guest.arguments(&arguments))
    }
}

fn work(_: Scope, site: &Site) -> Vec<Work> {
    let estimate = Duration::from_secs(6);
    let of = |started: Started| Work {
        name: started.name(),
        estimate,
        run: Box::new(move |site, name| measure(started, estimate, site, name)),
    };
    Started::all(site).into_iter().map(of).collect()
}

/// Returns the arguments for one emulated device of each kind. The devices' files are in `dir`.
fn one_of_each(dir: &Path) -> Result<Vec<String>> {
    let file = |name: &str, len: u64| -> Result<String> {
        let path = dir.join(name);
        fs::File::create(&path)
            .and_then(|file| file.set_len(len))
            .with_context(|| format!("cannot create the device file {name}"))?;
        Ok(path.display().to_string())
    };
    let [disk, pmem] = [file("disk", 64 << 20)?, file("pmem", 16 << 20)?];
    let vsock = dir.join("vsock");
    let arguments = [
        ("--disk", format!("path={disk},image_type=raw")),
        ("--pmem", format!("file={pmem}")),
        ("--vsock", format!("cid=3,socket={}", vsock.display())),
        ("--net", "tap=carom-own".into()),
        ("--rng", "src=/dev/urandom".into()),
        ("--console", "null".into()),
        ("--balloon", "size=0".into()),
    ];
    let words = arguments.into_iter().flat_map(|(option, value)| [option.into(), value]);
    Ok(words.chain(["--watchdog".into()]).collect())
}

fn measure(started: Started, estimate: Duration, site: &Site, name: &str) -> Result<Measured> {
    let job = format!("{PRINT_VERSIONS}sleep 1\necho {PROBE}idle\nsleep 0.5\n");
    let dir =
        tempfile::tempdir().context("cannot create a temporary directory for the files of the guest's devices")?;
    let outcome = table::run(started.guest(site, name, &job, dir.path())?, estimate, site)?;
    let idle = outcome.probes.first().context("the console has no CAROM-PROBE line")?;
    ensure!(idle.own_bytes > 0, "cannot read how much memory the VMM uses");
    let mib = f64::from(1 << 20);
    let program = program(started.vmm, site)?;
    let size = fs::metadata(&program).with_context(|| format!("cannot read {}", program.display()))?.len();
    let figures = [
        ("start_ms", start_ms(&outcome)?),
        ("end_ms", ms(outcome.elapsed)),
        ("own_mib", figure(idle.own_bytes) / mib),
        ("program_mib", figure(size) / mib),
    ];
    let mut row = Row::new(started.keys(), figures);
    let Started { vmm, devices, form } = started;
    if is_told_alike(vmm) && devices == Devices::None && form == Form::BzImage {
        row.figures.extend(figures_of_api(&program)?);
    }
    Measured::of(&outcome, vec![row])
}

/// True if a VMM has the same options and API as Carom.
fn is_told_alike(vmm: Vmm) -> bool {
    vmm.is_carom() || vmm == Vmm::CloudHypervisor
}

/// True if the site has another VMM, and its command template has the placeholder for a kernel of this format.
fn boots_other(site: &Site, form: Form) -> bool {
    let placeholder = match form {
        Form::BzImage => Placeholder::Kernel,
        Form::Vmlinux => Placeholder::Vmlinux,
    };
    site.other_vmm.as_ref().is_some_and(|other| other.has(placeholder))
}

fn program(vmm: Vmm, site: &Site) -> Result<PathBuf> {
    match vmm {
        Vmm::Carom => Ok(site.carom.clone()),
        Vmm::Base => {
            site.base_vmm.clone().context("CAROM_BASE_VMM is not set; set it to the path of another build of Carom")
        }
        Vmm::CloudHypervisor => site
            .cloud_hypervisor
            .clone()
            .context("CAROM_CLOUD_HYPERVISOR is not set; set it to the path of Cloud Hypervisor"),
        Vmm::Qemu | Vmm::QemuIntel => Ok(site.qemu.clone().unwrap_or("/usr/bin/qemu-system-x86_64".into())),
        Vmm::Other => Ok(site
            .other_vmm
            .as_ref()
            .context("CAROM_OTHER_VMM is not set; set it to 'NAME PROGRAM ARGUMENTS…' (docs/benchmarks.md)")?
            .program
            .clone()),
    }
}

/// Measures the time from the VMM's start to its first API answer, in ms. Also measures the median time of `vmm.ping`, with a new
/// connection for each call, in µs. `program` is Carom or Cloud Hypervisor, which have the same API.
fn figures_of_api(program: &Path) -> Result<[(String, f64); 2]> {
    let dir = tempfile::tempdir().context("cannot create a temporary directory for the API socket")?;
    let socket = dir.path().join("api");
    let mut command = Command::new(program);
    command.arg("--api-socket").arg(format!("path={}", socket.display()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let begun = Instant::now();
    let _server = KilledOnDrop(command.spawn().with_context(|| format!("cannot start {}", program.display()))?);
    let ping = || -> Result<f64> {
        let start = Instant::now();
        let (status, _) = api::exchange(&socket, "GET", "/api/v1/vmm.ping", None)?;
        ensure!(status == 200, "vmm.ping failed with status {status}");
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    while ping().is_err() {
        ensure!(begun.elapsed() < API_TIME, "the API of {} does not answer within {API_TIME:?}", program.display());
        thread::sleep(Duration::from_micros(200));
    }
    let ready = ms(begun.elapsed());
    let times = (0..CALLS).map(|_| ping()).collect::<Result<Vec<_>>>()?;
    Ok([
        ("api_ready_ms".into(), ready),
        ("api_us".into(), median(times.into_iter()).context("no API call was measured")?),
    ])
}

#[cfg(test)]
mod tests {
    use carom_tools::peers::OtherVmm;

    use super::*;

    #[test]
    fn other_vmm_starts_only_if_set_and_with_its_template_kernel() {
        let mut site = Site::default();
        let others = |site: &Site| {
            let names = Started::all(site).into_iter().map(Started::name);
            names.filter(|name| name.starts_with("other ")).collect::<Vec<_>>()
        };
        assert!(others(&site).is_empty());
        for (placeholder, name) in [("kernel", "other with none, bzImage"), ("vmlinux", "other with none, vmlinux")] {
            let text =
                format!("x /bin/sh {{{placeholder}}} {{initramfs}} {{cmdline}} {{memory_mib}} {{cpus}} {{device}}");
            site.other_vmm = Some(OtherVmm::parse(&text).unwrap());
            assert_eq!(others(&site), [name]);
        }
    }
}
