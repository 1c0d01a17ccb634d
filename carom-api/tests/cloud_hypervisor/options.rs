// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option strings of Cloud Hypervisor, and the outcome of parsing each with Carom. `options.tsv` lists them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use carom_api::cli::{self, CliOutcome};
use carom_api::config::NumaConfig;

/// Option string.
#[derive(Debug)]
pub(crate) struct OptionString {
    option: String,
    value: String,
    source: String,
    /// True if Cloud Hypervisor accepts the string, according to its documents and tests.
    pub(crate) theirs: bool,
    /// Carom's answer, as recorded in `options.tsv`: `taken`, or the reason of the rejection.
    outcome: String,
}

const TAKEN: &str = "taken";

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cloud_hypervisor/options.tsv")
}

/// Reads the file. Returns its header and the option strings.
pub(crate) fn read() -> (String, Vec<OptionString>) {
    let text = std::fs::read_to_string(path()).unwrap();
    let (mut head, mut strings) = (String::new(), Vec::new());
    for line in text.lines() {
        if line.starts_with('#') {
            writeln!(head, "{line}").unwrap();
            continue;
        }
        let columns: Vec<&str> = line.split('\t').collect();
        let [option, value, source, theirs, outcome] = columns[..] else { panic!("five columns: {line}") };
        assert!(matches!(theirs, "yes" | "no") && matches!(source, "docs" | "help" | "test"), "{line}");
        let theirs = theirs == "yes";
        let [option, value, source, outcome] = [option, value, source, outcome].map(String::from);
        strings.push(OptionString { option, value, source, theirs, outcome });
    }
    (head, strings)
}

impl OptionString {
    /// Parses the string with Carom's parser. Returns `taken`, or the reason for the rejection without the name of the option.
    pub(crate) fn said(&self) -> String {
        match self.parse() {
            Ok(()) => TAKEN.into(),
            Err(error) => error.strip_prefix(&self.option).unwrap_or(&error).trim_start_matches([':', ' ']).into(),
        }
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.outcome == TAKEN
    }

    fn parse(&self) -> Result<(), String> {
        let Self { option, value, .. } = self;
        // Only parse the string of a NUMA node. Checking the node needs the other nodes, which a single string does not contain.
        if option == "--numa" {
            return value.parse::<NumaConfig>().map(drop).map_err(|error| error.to_string());
        }
        let beside: &[&str] = match option.as_str() {
            "--restore" => &["--api-socket", "/tmp/api"],
            "--memory" if value.starts_with("size=0") => &["--kernel", "/k", "--memory-zone", "id=mem0,size=1G"],
            "--memory" => &["--kernel", "/k"],
            "--memory-zone" => &["--kernel", "/k", "--memory", "size=0"],
            "--landlock-rules" => &["--kernel", "/k", "--landlock"],
            "--platform" => &["--kernel", "/k", "--memory", "size=4G,shared=on"],
            "--disk" => &[
                "--kernel",
                "/k",
                "--memory",
                "size=4G,shared=on",
                "--platform",
                "num_pci_segments=16",
                "--rate-limit-group",
                "id=group0,bw_size=1M,bw_refill_time=100",
            ],
            _ => &["--kernel", "/k", "--memory", "size=4G,shared=on", "--platform", "num_pci_segments=16"],
        };
        let words = ["carom"].iter().chain(beside).copied().chain([option.as_str(), value.as_str()]);
        match cli::parse(words) {
            Ok(_) => Ok(()),
            Err(CliOutcome::Mistake(text)) => Err(text),
            Err(CliOutcome::Information(text)) => panic!("information: {text}"),
        }
    }
}

/// Removes the quoted value from a reason, so that the reason is the same for all values of a key.
fn without_value(reason: &str) -> String {
    let parts = reason.split_once(": '").and_then(|(key, rest)| Some((key, rest.split_once("' ")?.1)));
    parts.map_or_else(|| reason.into(), |(key, rest)| format!("{key}: {rest}"))
}

/// Returns the section of the page about option strings.
pub(crate) fn section() -> String {
    let (_, strings) = read();
    let theirs: Vec<&OptionString> = strings.iter().filter(|string| string.theirs).collect();
    let taken = theirs.iter().filter(|string| string.is_taken()).count();
    let mut text = format!(
        "\n## Option strings\n`carom-api/tests/cloud_hypervisor/options.tsv` has {} option strings that Cloud Hypervisor accepts, according to its documents, its `--help` \
         and its tests. A test gives each string to Carom. Carom accepts {taken} of them, and rejects the rest for these reasons:\n\n\
         | option | example | reason |\n| --- | --- | --- |\n",
        theirs.len(),
    );
    let mut reasons: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for OptionString { option, value, outcome, .. } in theirs.iter().filter(|string| !string.is_taken()) {
        reasons.entry((option, without_value(outcome))).or_default().push(value);
    }
    for ((option, reason), values) in reasons {
        let shortest = values.iter().min_by_key(|value| value.len()).unwrap();
        let more = if values.len() > 1 { format!(" and {} more", values.len() - 1) } else { String::new() };
        let escaped = reason.replace('|', "\\|").replace('<', "&lt;");
        let example = if shortest.is_empty() { "an empty value".into() } else { format!("`{shortest}`") };
        writeln!(text, "| `{option}` | {example}{more} | {escaped} |").unwrap();
    }
    text
}

#[test]
fn option_strings_are_taken_or_refused_as_recorded() {
    let (head, strings) = read();
    assert!(strings.len() > 500, "{}", strings.len());
    let mut text = head;
    for string in &strings {
        let OptionString { option, value, source, theirs, .. } = string;
        let theirs = if *theirs { "yes" } else { "no" };
        writeln!(text, "{option}\t{value}\t{source}\t{theirs}\t{}", string.said()).unwrap();
    }
    if std::env::var_os("CAROM_BLESS").is_some() {
        std::fs::write(path(), &text).unwrap();
    }
    for string in &read().1 {
        assert_eq!(string.said(), string.outcome, "{} {}", string.option, string.value);
    }
}

#[test]
fn mistake_in_cloud_hypervisor_is_a_mistake_here() {
    let (_, strings) = read();
    let wrong = strings.iter().filter(|string| !string.theirs);
    let taken: Vec<_> = wrong.filter(|string| string.is_taken()).collect();
    assert!(taken.is_empty(), "{taken:?}");
}

#[test]
fn syntax_of_an_option_string_is_never_the_reason() {
    // Carom has the same grammar as Cloud Hypervisor. So Carom must not reject a valid option string because of its syntax.
    let of_grammar = ["is not key=value", "unknown key", "double quote", "a list is", "empty part", "neither 'on' nor"];
    for string in read().1.iter().filter(|string| string.theirs && !string.is_taken()) {
        let reason = of_grammar.iter().find(|reason| string.outcome.contains(**reason));
        assert_eq!(reason, None, "{} {}: {}", string.option, string.value, string.outcome);
    }
}
