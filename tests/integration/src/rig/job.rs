// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bash script that the emulated machine runs: it sets the environment, binds devices, changes the directory and starts the
//! command.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::options::Options;

/// Offset on the second NVMe drive at which reads fail, in bytes.
pub(super) const BAD_PLACE: u64 = 300 << 20;

/// Variables for the command, with the PCI addresses of the devices that are bound to vfio-pci. `qemu.rs` sets these addresses.
const DEVICES: [(&str, &str); 11] = [
    ("CAROM_NVME", "0000:00:05.0"),
    ("CAROM_NVME2", "0000:00:06.0"),
    ("CAROM_EDU", "0000:00:07.0"),
    ("CAROM_EDU2", "0000:00:09.0"),
    ("CAROM_EDU_NARROW", "0000:00:0a.0"),
    ("CAROM_NET", "0000:00:0b.0"),
    ("CAROM_AER", "0000:01:00.0"),
    ("CAROM_USB", "0000:00:0d.0"),
    ("CAROM_AHCI", "0000:02:00.0"),
    IGB,
    ("CAROM_NOT_VIABLE", "0000:00:08.0"),
];

/// Variable for the igb card, which emulators older than QEMU 8.0 lack.
const IGB: (&str, &str) = ("CAROM_IGB", "0000:03:00.0");

/// File in the directory of `--out`. The emulator writes the counts of instructions between marks to this file.
pub(super) const INSTRUCTIONS: &str = "instructions";

/// PCI slot of the first drive of `--more-nvme`. The other drives are in the next slots.
pub(super) const FIRST_MORE_SLOT: u8 = 0x10;
/// PCI slot of the drive of `--null-drive`, after the slots of `--more-nvme`.
pub(super) const NULL_SLOT: u8 = 0x1c;

/// Inputs for the script: properties of this process and of the machine.
pub(super) struct Surroundings<'a> {
    /// Top of the checkout.
    pub(super) checkout: &'a Path,
    /// Directory in which the command starts.
    pub(super) directory: &'a Path,
    /// Variables of this process.
    pub(super) environment: &'a [(OsString, OsString)],
    /// Accelerator of the machine: `tcg` or `kvm`.
    pub(super) accelerator: &'a str,
    /// Version that the emulator reports.
    pub(super) emulator: &'a str,
    /// True if the machine has an igb card.
    pub(super) igb: bool,
    /// Directory that the command can write to.
    pub(super) out: Option<&'a Path>,
    /// Rows and columns of the command's terminal, if they are known.
    pub(super) window: Option<(u16, u16)>,
}

/// Returns the script for `options`.
///
/// # Errors
/// Fails if a word contains a NUL.
pub(super) fn script(options: &Options, around: &Surroundings) -> Result<Vec<u8>> {
    let mut script = b"ulimit -l unlimited 2>/dev/null\n".to_vec();
    if let Some((rows, columns)) = around.window {
        script.extend_from_slice(format!("stty rows {rows} cols {columns}\n").as_bytes());
    }
    for (name, value) in around.environment.iter().filter(|(name, _)| is_passed(name)) {
        export(&mut script, name, value)?;
    }
    for item in &options.env {
        let (name, value) = match item.split_once('=') {
            Some((name, value)) => (name, OsStr::new(value)),
            None => (item.as_str(), find(around.environment, item)),
        };
        export(&mut script, name.as_ref(), value)?;
    }
    export(&mut script, "CAROM_RIG".as_ref(), around.accelerator.as_ref())?;
    export(&mut script, "CAROM_EMULATOR".as_ref(), around.emulator.as_ref())?;
    export(&mut script, "CAROM_NVME2_BAD".as_ref(), BAD_PLACE.to_string().as_ref())?;
    let devices: Vec<_> = DEVICES.into_iter().filter(|device| around.igb || *device != IGB).collect();
    for (name, address) in &devices {
        export(&mut script, name.as_ref(), address.as_ref())?;
    }
    let address = |slot: u8| format!("0000:00:{slot:02x}.0");
    let mut more: Vec<String> = (FIRST_MORE_SLOT..).take(options.more_nvme.into()).map(address).collect();
    export(&mut script, "CAROM_MORE_NVME".as_ref(), more.join(" ").as_ref())?;
    if options.null_drive {
        export(&mut script, "CAROM_NULL_NVME".as_ref(), address(NULL_SLOT).as_ref())?;
        more.push(address(NULL_SLOT));
    }
    // Linux names virtio disks by the order of their addresses, see `qemu.rs`.
    let swap = if options.disk.is_some() { "/dev/vdb" } else { "/dev/vda" };
    export(&mut script, "CAROM_SWAP".as_ref(), swap.as_ref())?;
    if let Some(out) = around.out {
        export(&mut script, "CAROM_OUT".as_ref(), out.as_os_str())?;
        if options.count_instructions && around.accelerator == "tcg" {
            export(&mut script, "CAROM_INSTRUCTIONS".as_ref(), out.join(INSTRUCTIONS).as_os_str())?;
        }
    }
    if !options.no_bind {
        script.extend_from_slice(&quoted(around.checkout.join("scripts/lib/vfio-bind").as_os_str())?);
        for address in devices.iter().map(|(_, address)| *address).chain(more.iter().map(String::as_str)) {
            script.push(b' ');
            script.extend_from_slice(address.as_bytes());
        }
        script.extend_from_slice(b" || exit 125\n");
    }
    script.extend_from_slice(b"cd ");
    script.extend_from_slice(&quoted(around.directory.as_os_str())?);
    script.extend_from_slice(b" || exit 125\nexec");
    for word in &options.command {
        script.push(b' ');
        script.extend_from_slice(&quoted(word)?);
    }
    script.push(b'\n');
    Ok(script)
}

/// True if the command gets this variable of this process even without `--env`.
fn is_passed(name: &OsStr) -> bool {
    match name.to_str() {
        Some("PATH" | "HOME" | "LANG" | "TERM") => true,
        Some("CAROM_SCRIPT") | None => false,
        Some(name) => name.starts_with("CAROM_"),
    }
}

fn find<'a>(environment: &'a [(OsString, OsString)], name: &str) -> &'a OsStr {
    environment.iter().find(|(known, _)| known == name).map_or(OsStr::new(""), |(_, value)| value)
}

fn export(script: &mut Vec<u8>, name: &OsStr, value: &OsStr) -> Result<()> {
    script.extend_from_slice(b"export ");
    script.extend_from_slice(name.as_bytes());
    script.push(b'=');
    script.extend_from_slice(&quoted(value)?);
    script.push(b'\n');
    Ok(())
}

fn quoted(word: &OsStr) -> Result<Cow<'_, [u8]>> {
    shlex::bytes::try_quote(word.as_bytes()).with_context(|| format!("{}", word.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    fn options(command: &[&str]) -> Options {
        Options { command: command.iter().map(OsString::from).collect(), ..Options::plain() }
    }

    fn output(options: &Options, environment: &[(&str, &str)]) -> String {
        output_of(options, environment, true)
    }

    /// Runs the script for `options` as the machine would, and returns its output. The checkout's name contains a blank, a
    /// quote and a comma. In this checkout, `vfio-bind` only prints its arguments.
    fn output_of(options: &Options, environment: &[(&str, &str)], igb: bool) -> String {
        let dir = tempfile::tempdir().unwrap();
        let checkout = dir.path().join("a clone, it's $HOME");
        fs::create_dir_all(checkout.join("scripts/lib")).unwrap();
        let bind = checkout.join("scripts/lib/vfio-bind");
        fs::write(&bind, "#!/bin/sh\necho \"bind $*\"\n").unwrap();
        fs::set_permissions(&bind, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let environment: Vec<_> = environment.iter().map(|&(name, value)| (name.into(), value.into())).collect();
        let around = Surroundings {
            checkout: &checkout,
            directory: &checkout,
            environment: &environment,
            accelerator: "tcg",
            emulator: "QEMU 10",
            igb,
            out: Some(&checkout.join("out put")),
            window: None,
        };
        let file = dir.path().join("job");
        fs::write(&file, script(options, &around).unwrap()).unwrap();
        let output = Command::new("bash").arg(&file).env_clear().output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().replace(dir.path().to_str().unwrap(), "DIR")
    }

    #[test]
    fn command_gets_exact_arguments_directory_and_bound_devices() {
        let script = r#"printf '<%s>\n' "$PWD" "$CAROM_OUT" "$CAROM_NVME" "$CAROM_RIG" "$CAROM_NVME2_BAD" "$@""#;

        let said = output(&options(&["/bin/bash", "-c", script, "bash", "a b", "it's", "", "$HOME\n"]), &[]);

        let devices = DEVICES.map(|(_, address)| address).join(" ");
        let clone = "DIR/a clone, it's $HOME";
        let expected = format!(
            "bind {devices}\n<{clone}>\n<{clone}/out put>\n<0000:00:05.0>\n<tcg>\n<314572800>\n<a b>\n<it's>\n<>\n<$HOME\n>\n"
        );
        assert_eq!(said, expected);
    }

    #[test]
    fn card_missing_in_the_emulator_is_neither_bound_nor_named() {
        let options = options(&["/bin/sh", "-c", "echo ${CAROM_IGB-none} $CAROM_AHCI"]);
        let without = output_of(&options, &[], false);
        assert!(without.starts_with("bind 0000:00:05.0 ") && !without.contains("0000:03:00.0"), "{without}");
        assert!(without.ends_with(" 0000:00:08.0\nnone 0000:02:00.0\n"), "{without}");
        assert!(output(&options, &[]).ends_with(" 0000:00:08.0\n0000:03:00.0 0000:02:00.0\n"));
    }

    #[test]
    fn no_bind_leaves_devices_unbound() {
        let options = Options { no_bind: true, ..options(&["/bin/echo", "hi"]) };
        assert_eq!(output(&options, &[]), "hi\n");
    }

    #[test]
    fn further_drives_are_bound_and_named() {
        let options = Options { more_nvme: 2, ..options(&["/bin/sh", "-c", "echo $CAROM_MORE_NVME"]) };
        let devices = DEVICES.map(|(_, address)| address).join(" ");
        let more = "0000:00:10.0 0000:00:11.0";
        assert_eq!(output(&options, &[]), format!("bind {devices} {more}\n{more}\n"));
    }

    #[test]
    fn swap_device_follows_the_requested_disk() {
        let options = Options { no_bind: true, ..options(&["/bin/sh", "-c", "echo $CAROM_SWAP"]) };
        assert_eq!(output(&options, &[]), "/dev/vda\n");
        assert_eq!(output(&Options { disk: Some("/srv/a.raw".into()), ..options }, &[]), "/dev/vdb\n");
    }

    #[test]
    fn own_variables_pass_and_others_only_if_named() {
        let environment = [
            ("HOME", "/a b"),
            ("CAROM_X", "x y"),
            ("CAROM_SCRIPT", "rig"),
            ("SECRET", "no"),
            ("ASKED", "yes"),
            ("CAROM_RIG", "other"),
        ];
        let script =
            r#"echo "$HOME/$CAROM_X/${CAROM_SCRIPT-none}/${SECRET-none}/$ASKED/$SET/${UNSET-none}/$CAROM_RIG""#;
        let env = ["ASKED", "SET=to this", "UNSET"].map(String::from).to_vec();
        let options = Options { env, no_bind: true, ..options(&["/bin/bash", "-c", script]) };

        assert_eq!(output(&options, &environment), "/a b/x y/none/none/yes/to this//tcg\n");
    }
}
