// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/vm`: runs a Debian guest on Carom, in the rig or on this host. The guest's console is on this terminal.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::distribution::Distribution;
use crate::packages::as_root;
use crate::tools::{Tools, Usage};
use crate::{kvm, work_dir};

/// Memory of the emulated machine in MiB, in addition to the guest's memory.
const RIG_MIB: u64 = 1536;

/// Network of the guest: the tap interface and the first three numbers of its addresses.
const TAP: &str = "carom0";
const NET: &str = "10.99.17";

/// Time limit of a machine in the rig, in seconds: 11 days. The rig requires a limit.
const RIG_TIME: &str = "999999";

/// Options of `scripts/vm`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// RAM, 256M or more.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size)]
    memory: u64,
    /// vCPUs.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=254))]
    cpus: u8,
    /// Size of the disk.
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = size)]
    size: u64,
    /// Disk image to keep.
    #[arg(long, value_name = "FILE")]
    disk: Option<PathBuf>,
    /// Put the devices for disk, network and random bytes behind the virtio-iommu.
    #[arg(long)]
    iommu: bool,
    /// Run on this host's KVM, even if it does not seem to work.
    #[arg(long, conflicts_with = "rig")]
    direct: bool,
    /// Run in the emulated machine, even if KVM works.
    #[arg(long)]
    rig: bool,
    /// Only build what the machine needs, and print the directory of the distribution.
    #[arg(long)]
    prepare: bool,
    /// Additional options of carom.
    #[arg(last = true, value_name = "OPTION")]
    more: Vec<OsString>,
}

/// Parses a size such as `512M` or `2G`. Returns the size in MiB, at least 1.
fn size(text: &str) -> Result<u64, String> {
    let bad = || "must be a size such as 2G or 512M".to_owned();
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(bad)?;
    let mib = match unit {
        "M" => 1,
        "G" => 1024,
        _ => return Err(bad()),
    };
    digits.parse::<u64>().ok().filter(|&number| number > 0).and_then(|number| number.checked_mul(mib)).ok_or_else(bad)
}

impl Options {
    fn check(&self) -> Result<()> {
        if self.memory < 256 {
            bail!(Usage("--memory: the guest's Debian needs 256M or more".into()));
        }
        Ok(())
    }

    /// Returns the arguments of carom. `disk` is the path of the disk image as carom sees it.
    fn carom(&self, disk: &str, files: &Distribution) -> Vec<OsString> {
        let iommu = if self.iommu { ",iommu=on" } else { "" };
        let strict = if self.iommu { " iommu.strict=1" } else { "" };
        let mut words: Vec<OsString> = vec!["--kernel".into(), (&files.kernel).into()];
        words.extend(["--initramfs".into(), (&files.initrd).into()]);
        let mut add = |option: &str, value: String| words.extend([option.into(), value.into()]);
        add("--cmdline", format!("console=ttyS0 {} quiet{strict}", Distribution::ROOT));
        add("--cpus", format!("boot={}", self.cpus));
        add("--memory", format!("size={}M", self.memory));
        add("--disk", format!("path={disk},image_type=raw{iommu}"));
        add("--net", format!("tap={TAP}{iommu}"));
        add("--rng", format!("src=/dev/urandom{iommu}"));
        words.extend(self.more.iter().cloned());
        words
    }
}

impl Tools<'_> {
    /// Starts the machine, waits for its end and returns the exit status.
    ///
    /// # Errors
    /// Fails on wrong options, if something cannot be built, or on a signal.
    pub fn vm(&self, options: &Options) -> Result<u8> {
        options.check()?;
        let dir = self.distribution()?;
        if options.prepare {
            println!("{}", dir.display());
            return Ok(0);
        }
        let files = Distribution::in_directory(&dir);
        self.need_packages("running guests", &["qemu-system-x86", "gcc", "libc6-dev", "dnsmasq-base", "iproute2"])?;
        let carom = self.carom()?.remove(0).1;
        let work = work_dir::create(&env::temp_dir(), "carom-vm")?;
        let disk = match &options.disk {
            Some(disk) => disk.clone(),
            None => work.path().join("disk.raw"),
        };
        self.make_disk(&files.disk, &disk, options.size)?;
        let direct = options.direct || (!options.rig && kvm::works(work.path()));
        let network = self.checkout.join("scripts/lib/vm-network");
        let mut command = if direct {
            let mut command = as_root("env")?;
            command.arg(network);
            command
        } else {
            let mut command = self.rig_command()?;
            command.args(["--terminal", "--no-bind", "--time-limit", RIG_TIME, "--disk"]).arg(&disk);
            command.arg("--memory").arg(format!("{}M", options.memory + RIG_MIB)).arg("--").arg(network);
            command
        };
        let disk = if direct { fs::canonicalize(&disk)?.display().to_string() } else { "/dev/vda".into() };
        command.args([TAP, NET]).arg(&carom).args(options.carom(&disk, &files));
        self.progress.say(&welcome(direct));
        self.status(&mut command, "cannot start the machine")
    }

    /// Copies the distribution's disk image to `disk` if `disk` is missing, and enlarges it to at least `size` MiB.
    fn make_disk(&self, source: &Path, disk: &Path, size: u64) -> Result<()> {
        let failed = || format!("making {}", disk.display());
        if !disk.exists() {
            self.progress.show(&failed());
            self.run(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(source).arg(disk))
                .with_context(failed)?;
        }
        let bytes = size.checked_mul(1 << 20).with_context(|| Usage("--size: is too large".into()))?;
        let file = File::options().write(true).open(disk).with_context(failed)?;
        if file.metadata().with_context(failed)?.len() < bytes {
            file.set_len(bytes).with_context(failed)?;
        }
        Ok(())
    }
}

/// Returns the message for the user while the machine boots.
fn welcome(direct: bool) -> String {
    let (place, end) = if direct {
        ("on this host's KVM, in some seconds", "")
    } else {
        ("in an emulated machine, in two minutes", "; Ctrl-] three times within a second ends the machine immediately")
    };
    format!("Debian boots {place}. Log in as root, without a password. `poweroff` ends the machine{end}.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{assert_refused, parse, with_tools};

    fn words(options: &[&str]) -> String {
        let words =
            parse(options, Options::check).unwrap().carom("/dev/vda", &Distribution::in_directory(Path::new("/d")));
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn options_define_the_machine() {
        let plain = words(&[]);
        assert!(plain.contains("--memory size=1024M ") && plain.contains("--disk path=/dev/vda,image_type=raw "));
        assert!(!plain.contains("iommu"), "{plain}");
        let behind = words(&["--iommu", "--cpus", "3", "--", "--vsock", "cid=3,socket=/s"]);
        assert!(behind.contains("boot=3") && behind.contains("image_type=raw,iommu=on"), "{behind}");
        assert!(behind.ends_with("iommu=on --vsock cid=3,socket=/s"), "{behind}");
    }

    #[test]
    fn wrong_options_are_rejected() {
        let uses: [(&[&str], &str); 6] = [
            (&["--memory", "128M"], "256M or more"),
            (&["--memory", "1"], "must be a size"),
            (&["--size", "0G"], "must be a size"),
            (&["--cpus", "0"], "--cpus"),
            (&["--direct", "--rig"], "cannot be used with"),
            (&["disk"], "unexpected"),
        ];
        assert_refused(&uses, Options::check);
    }

    #[test]
    fn disk_is_made_once_and_only_grows() {
        let dir = tempfile::tempdir().unwrap();
        let (source, disk) = (dir.path().join("source"), dir.path().join("disk"));
        fs::write(&source, "file system").unwrap();
        let make = |size| with_tools(dir.path(), dir.path(), |tools| tools.make_disk(&source, &disk, size)).unwrap();
        make(2);
        assert_eq!(fs::metadata(&disk).unwrap().len(), 2 << 20);
        fs::write(&source, "another one").unwrap();
        make(1);
        let bytes = fs::read(&disk).unwrap();
        assert!(bytes.starts_with(b"file system") && bytes.len() == 2 << 20);
    }

    #[test]
    fn help_names_each_option() {
        let help = include_str!("help/vm.txt");
        for argument in Options::augment_args(clap::Command::new("vm")).get_arguments() {
            let Some(name) = argument.get_long() else { continue };
            assert!(help.contains(&format!("--{name} ")), "--{name} is not in the help");
        }
    }
}
