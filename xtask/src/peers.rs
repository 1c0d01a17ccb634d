// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Other VMMs that Carom is compared with. Environment variables name these VMMs.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Access, access};

/// Variable with QEMU's program. The default is the QEMU in `PATH`.
pub const QEMU: &str = "CAROM_QEMU";

/// Variable with Cloud Hypervisor's program.
pub const CLOUD_HYPERVISOR: &str = "CAROM_CLOUD_HYPERVISOR";

/// Variable with another build of Carom, for example from before a change.
pub const BASE: &str = "CAROM_BASE_VMM";

/// Variable with another VMM, see [`OtherVmm`].
pub const OTHER: &str = "CAROM_OTHER_VMM";

/// Checks all variables that name other VMMs.
///
/// # Errors
/// Fails if a variable is wrong. The error names the variable.
pub fn check() -> Result<()> {
    program(QEMU)?;
    program(CLOUD_HYPERVISOR)?;
    program(BASE)?;
    OtherVmm::from_env().map(|_| ())
}

/// Returns the program that a variable names, or `None` if the variable is not set.
///
/// # Errors
/// Fails if the variable does not name a program.
pub fn program(variable: &str) -> Result<Option<PathBuf>> {
    env::var_os(variable).map(|path| existing(Path::new(&path)).context(variable.to_owned())).transpose()
}

/// Returns the absolute path of the executable file `path`. Programs are started by this absolute path, because a relative path without a
/// slash would be searched in `PATH`.
fn existing(path: &Path) -> Result<PathBuf> {
    ensure!(
        path.is_file() && access(path, Access::EXEC_OK).is_ok(),
        "'{}' is not the path of an executable file",
        path.display()
    );
    absolute(path).with_context(|| path.display().to_string())
}

/// Placeholder in the arguments of a VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placeholder {
    /// The guest's kernel as a bzImage.
    Kernel,
    /// The guest's kernel as an ELF file with a PVH entry.
    Vmlinux,
    /// The guest's initramfs.
    Initramfs,
    /// The guest kernel's parameters, in one argument.
    Cmdline,
    /// The guest's memory, in MiB.
    MemoryMib,
    /// Number of vCPUs.
    Cpus,
    /// File for the output of the serial console, unless the VMM writes this output to its stdout.
    Console,
    /// sysfs directory of the guest's drive.
    Device,
    /// PCI address of the guest's drive.
    Address,
}

/// All placeholders with their names.
const PLACEHOLDERS: [(&str, Placeholder); 9] = [
    ("kernel", Placeholder::Kernel),
    ("vmlinux", Placeholder::Vmlinux),
    ("initramfs", Placeholder::Initramfs),
    ("cmdline", Placeholder::Cmdline),
    ("memory_mib", Placeholder::MemoryMib),
    ("cpus", Placeholder::Cpus),
    ("console", Placeholder::Console),
    ("device", Placeholder::Device),
    ("address", Placeholder::Address),
];

/// Groups of required placeholders. A template contains exactly one placeholder of each group, so that all VMMs get the same guest.
const NEEDED: [&[&str]; 5] = [&["kernel", "vmlinux"], &["initramfs"], &["cmdline"], &["memory_mib"], &["cpus"]];

/// Part of an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Value(Placeholder),
}

/// VMM that a template `NAME PROGRAM ARGUMENTS…` describes. The template is split into words by the rules of a shell. The arguments contain
/// placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherVmm {
    /// Name of the VMM.
    pub name: String,
    /// Program of the VMM.
    pub program: PathBuf,
    arguments: Vec<Vec<Part>>,
}

impl OtherVmm {
    /// Returns the VMM that [`OTHER`] describes, or `None` if the variable is not set.
    ///
    /// # Errors
    /// Fails if the template is wrong.
    pub fn from_env() -> Result<Option<Self>> {
        let Some(text) = env::var_os(OTHER) else { return Ok(None) };
        let text = text.to_str().context("must be UTF-8");
        text.and_then(Self::parse).context(OTHER).map(Some)
    }

    /// Parses a template.
    ///
    /// # Errors
    /// Fails if the text is not a template. The error says what is wrong.
    pub fn parse(text: &str) -> Result<Self> {
        let words = shlex::split(text).context("unclosed quote, or backslash at the end")?;
        let [name, program, arguments @ ..] = &words[..] else { bail!("must be NAME PROGRAM ARGUMENTS…") };
        ensure!(!name.is_empty(), "must be NAME PROGRAM ARGUMENTS…, but the name is empty");
        let arguments = arguments.iter().map(|word| parts(word)).collect::<Result<_>>()?;
        let vmm = Self { name: name.clone(), program: existing(Path::new(program))?, arguments };
        for names in NEEDED {
            let has = |wanted: &&&str| PLACEHOLDERS.iter().any(|(name, which)| name == *wanted && vmm.has(*which));
            let shown = names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>().join(" or ");
            ensure!(
                names.iter().filter(has).count() == 1,
                "must have {}{shown} in the arguments",
                if names.len() > 1 { "one of " } else { "" }
            );
        }
        Ok(vmm)
    }

    /// True if the arguments contain this placeholder.
    #[must_use]
    pub fn has(&self, placeholder: Placeholder) -> bool {
        self.arguments.iter().flatten().any(|part| *part == Part::Value(placeholder))
    }

    /// True if the VMM accepts a drive.
    #[must_use]
    pub fn takes_drive(&self) -> bool {
        self.has(Placeholder::Device) || self.has(Placeholder::Address)
    }

    /// Returns the arguments. If a placeholder has no `value`, leaves out its argument, and the option before that argument.
    pub fn arguments(&self, value: impl Fn(Placeholder) -> Option<OsString>) -> Vec<OsString> {
        let filled = |part: &Part| match part {
            Part::Text(text) => Some(text.into()),
            Part::Value(placeholder) => value(*placeholder),
        };
        let is_option = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
        let mut words = Vec::new();
        for parts in &self.arguments {
            match parts.iter().map(filled).collect::<Option<OsString>>() {
                Some(word) => words.push(word),
                None if matches!(parts.first(), Some(Part::Text(text)) if text.starts_with('-')) => {}
                None => drop(words.pop_if(|word| is_option(word))),
            }
        }
        words
    }
}

/// Splits an argument into its parts. Only braces around a name mark a placeholder. All other braces, such as the braces of JSON, stay
/// unchanged.
fn parts(word: &str) -> Result<Vec<Part>> {
    let is_name = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    let (mut parts, mut text, mut rest) = (Vec::new(), String::new(), word);
    while let Some((before, after)) = rest.split_once('{') {
        text.push_str(before);
        let Some((name, behind)) = after.split_once('}').filter(|(name, _)| is_name(name)) else {
            text.push('{');
            rest = after;
            continue;
        };
        let known = PLACEHOLDERS.iter().find(|(known, _)| *known == name);
        let (_, placeholder) = known.with_context(|| {
            let known = PLACEHOLDERS.map(|(name, _)| format!("{{{name}}}")).join(", ");
            format!("unknown placeholder {{{name}}}; known are {known}")
        })?;
        parts.extend([Part::Text(std::mem::take(&mut text)), Part::Value(*placeholder)]);
        rest = behind;
    }
    parts.push(Part::Text(text + rest));
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "-k {kernel} -i {initramfs} -a {cmdline} -m {memory_mib}M -c {cpus}";

    /// Returns the arguments for [`WHOLE`] and `more`, with or without a drive.
    fn arguments(more: &str, drive: bool) -> Vec<String> {
        let vmm = OtherVmm::parse(&format!("other /bin/sh {WHOLE} {more}")).unwrap();
        assert_eq!((vmm.name.as_str(), vmm.program.as_path()), ("other", Path::new("/bin/sh")));
        let value = |placeholder| {
            let text = match placeholder {
                Placeholder::Cmdline => "a b=\"c\"",
                Placeholder::Device | Placeholder::Address => return drive.then(|| "0:1".into()),
                _ => "x",
            };
            Some(text.into())
        };
        vmm.arguments(value).into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn template_splits_like_a_shell_and_keeps_values_with_blanks() {
        let words = arguments(r#"'{"a": {}}' "in {console}!" {"#, false);
        let expected = ["-k", "x", "-i", "x", "-a", "a b=\"c\"", "-m", "xM", "-c", "x", "{\"a\": {}}", "in x!", "{"];
        assert_eq!(words, expected);
    }

    #[test]
    fn drive_argument_without_a_drive_is_left_out_with_its_option() {
        let more = "run -v -d vfio,host={address} --vfio={device} -q";
        assert_eq!(arguments(more, true)[10..], ["run", "-v", "-d", "vfio,host=0:1", "--vfio=0:1", "-q"]);
        assert_eq!(arguments(more, false)[10..], ["run", "-v", "-q"]);
        assert_eq!(arguments("run {device}", false)[10..], ["run"]);
    }

    #[test]
    fn drive_is_taken_by_either_of_its_placeholders() {
        let takes = |more: &str| OtherVmm::parse(&format!("o /bin/sh {WHOLE} {more}")).unwrap().takes_drive();
        assert!(takes("{device}") && takes("a={address}") && !takes("device"));
    }

    #[test]
    fn wrong_template_gives_a_specific_error() {
        for (text, reason) in [
            (String::new(), "must be NAME PROGRAM ARGUMENTS…"),
            ("other".into(), "must be NAME PROGRAM ARGUMENTS…"),
            (format!("'' /bin/sh {WHOLE}"), "the name is empty"),
            (format!("other '/bin/sh {WHOLE}"), "unclosed quote"),
            (format!("other /no/program {WHOLE}"), "'/no/program' is not"),
            (format!("other sh {WHOLE}"), "'sh' is not"),
            (format!("other /bin/sh {WHOLE} {{memory}}"), "unknown placeholder {memory}; known are {kernel}, "),
            (format!("other /bin/sh {WHOLE} {{vmlinux}}"), "must have one of {kernel} or {vmlinux} "),
            ("other /bin/sh {kernel} {initramfs} {cmdline} {memory_mib}".into(), "must have {cpus} "),
        ] {
            let said = OtherVmm::parse(&text).unwrap_err().to_string();
            assert!(said.contains(reason), "{text}: {said}");
        }
    }

    #[test]
    fn paths_without_an_executable_file_are_rejected() {
        assert_eq!(existing(Path::new("/bin/sh")).unwrap(), Path::new("/bin/sh"));
        for path in ["", "/bin", "/etc/passwd", "/no/such/file"] {
            let said = existing(Path::new(path)).unwrap_err().to_string();
            assert_eq!(said, format!("'{path}' is not the path of an executable file"));
        }
    }
}
