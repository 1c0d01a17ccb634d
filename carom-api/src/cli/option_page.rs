// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page `docs/options.md`, generated from the definitions of the command line and of the OpenAPI document.
//!
//! The help of an option lists its parts with their values: `size=SIZE[,shared=on|off]`. For each part, the OpenAPI document has a field
//! with the same name. The page uses the description of this field as the meaning of the part. To find the defaults, the generator parses a
//! minimal value of the option.

use std::fmt::Write;

use clap::{Arg, CommandFactory};
use serde::Serialize;
use serde_json::Value;

use super::{Cli, CliOutcome, parse};
use crate::config::{
    CpusConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig, NumaConfig, PciSegmentConfig, PlatformConfig,
    RateLimitGroupConfig, SerialConfig,
};
use crate::document;
use crate::kinds::KINDS;
use crate::snapshot::RestoreConfig;

const HEAD: &str = "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->
# Options
This page is the reference of the command line of `carom`, for readers who know which option they need. The [guide](guide.md) shows
how to use the options, and [how a value is written](guide.md#how-a-value-is-written).

`CAROM_BLESS=1 cargo test -p carom-api option_page` generates this page from the source of `carom --help`.

In the column *default*, `required` marks a part that must be given. `none` means that the part has no default value.
Sizes take the suffixes K, M and G (powers of 1024).

";

/// Parts of options that configure the program instead of a VM: option, part, values, default, meaning.
const PROGRAM_PARTS: &[(&str, &str, &str, &str, &str)] = &[
    ("--api-socket", "path", "FILE", "none", "Path of the unix socket. `FILE` without `path=` means the same."),
    ("--api-socket", "fd", "N", "none", "Descriptor of a listening unix socket, inherited from the parent."),
    ("--event-monitor", "path", "FILE", "none", "File to which Carom writes events."),
    ("--event-monitor", "fd", "N", "none", "Inherited descriptor, open for writing."),
    (
        "--crash-report",
        "path",
        "FILE",
        "none",
        "File to which Carom appends reports. `FILE` without `path=` means the same.",
    ),
    ("--crash-report", "fd", "N", "none", "Inherited descriptor, open for writing."),
    ("--metrics", "tcp", "ADDRESS:PORT", "none", "Address and port to listen on."),
    (
        "--inherit",
        "fd",
        "N",
        "required",
        "Number of the inherited descriptor, which refers to `/dev/kvm`, `/dev/iommu`, a VFIO device, a file, a pipe or a socket.",
    ),
];

/// Parts of a rate limit, with their meaning. In the OpenAPI document, these values are not fields of the device, but fields of separate
/// objects.
const RATE_PARTS: &[(&str, &str)] = &[
    ("bw_size", "Bytes that the device may transfer in each period of `bw_refill_time`."),
    ("bw_refill_time", "Length of the period of `bw_size` in milliseconds."),
    ("bw_one_time_burst", "Additional bytes that the device may transfer once."),
    ("ops_size", "Operations that the device may do in each period of `ops_refill_time`."),
    ("ops_refill_time", "Length of the period of `ops_size` in milliseconds."),
    ("ops_one_time_burst", "Additional operations that the device may do once."),
];

/// Parts whose field in the document has another name: option, part, field.
const RENAMED: &[(&str, &str, &str)] = &[
    ("--cpus", "boot", "boot_vcpus"),
    ("--cpus", "max", "max_vcpus"),
    ("--platform", "iommu_address_width", "iommu_address_width_bits"),
    ("--net", "fd", "fds"),
    ("--net", "socket", "vhost_socket"),
    ("--disk", "socket", "vhost_socket"),
];

/// Parts that the help leaves out for brevity: option, part, values.
const NOT_IN_HELP: &[(&str, &str, &str)] = &[
    ("--disk", "vhost_user", "on|off"),
    ("--disk", "socket", "FILE"),
    ("--disk", "lock_granularity", "byte-range|full"),
    ("--platform", "system_manufacturer", "TEXT"),
    ("--platform", "system_product_name", "TEXT"),
    ("--platform", "system_version", "TEXT"),
    ("--platform", "system_sku_number", "TEXT"),
    ("--platform", "system_family", "TEXT"),
    ("--platform", "chassis_asset_tag", "TEXT"),
    ("--restore", "memory_restore_mode", "copy|ondemand"),
    ("--restore", "zone_updates", "[ID@NODE,…]"),
];

/// Parts whose default the generator cannot find: option, part, default.
const DEFAULTS: &[(&str, &str, &str)] = &[
    ("--disk", "path", "required, except with `vhost_user=on`"),
    ("--iommu-bounce", "threshold", "`auto`"),
    ("--iommu-bounce", "threshold_write", "`auto`"),
    ("--memory", "size", "`512M`"),
];

/// Parts whose meaning differs from the description of the field: option, part, meaning.
const MEANINGS: &[(&str, &str, &str)] = &[(
    "--net",
    "fd",
    "Inherited descriptor of a tap or macvtap interface. `fd=[N,N]` gives one descriptor for each pair of queues.",
)];

/// Alternative names of parts. The page does not list these names.
const ALIASES: &[&str] = &["serial_number", "uuid", "vhost_socket"];

/// Table row for the modes of `--serial` and `--console`. The row precedes the rows of the parts.
const MODES: &str = "| mode | `off`, `null`, `tty`, `pty`, `file=PATH`, `socket=PATH` | see above | Destination of the output, see \
                     [the serial port](guide.md#the-serial-port). |\n";

/// Source of one section: the option, its schema in the document, and the fields of a minimal value.
struct Source {
    option: &'static str,
    schema: String,
    minimal: Value,
}

/// Part of an option's value, in the notation of the help.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    key: String,
    values: String,
}

fn source<T>(option: &'static str, schema: &str, minimal: &str) -> Source
where
    T: std::str::FromStr<Err: std::fmt::Debug> + Serialize,
{
    let minimal = serde_json::to_value(minimal.parse::<T>().unwrap()).unwrap();
    Source { option, schema: schema.into(), minimal }
}

fn sources(document: &Value) -> Vec<Source> {
    let minimal = |option| match option {
        "--device" => "path=/d",
        "--user-device" => "socket=/s",
        "--fs" => "tag=t,socket=/s",
        "--disk" => "path=/i",
        "--pmem" => "file=/f",
        "--vsock" => "cid=3,socket=/s",
        "--balloon" => "size=0",
        "--console" => "off",
        _ => "",
    };
    let kinds = KINDS.iter().map(|kind| {
        let option = kind.field.option();
        let minimal = serde_json::to_value(kind.parse(minimal(option)).unwrap()).unwrap();
        let property = document["components"]["schemas"]["VmConfig"]["properties"][kind.field.json()].to_string();
        let schema = property.split("#/components/schemas/").nth(1).and_then(|rest| rest.split('"').next());
        let schema = schema.unwrap_or_else(|| panic!("{option}: the document has no schema of its field"));
        Source { option, schema: schema.into(), minimal }
    });
    kinds
        .chain([
            source::<CpusConfig>("--cpus", "CpusConfig", "boot=1"),
            source::<MemoryConfig>("--memory", "MemoryConfig", "size=512M"),
            source::<MemoryZoneConfig>("--memory-zone", "MemoryZoneConfig", "id=z,size=512M"),
            source::<NumaConfig>("--numa", "NumaConfig", "guest_numa_id=0"),
            source::<PlatformConfig>("--platform", "PlatformConfig", "iommufd=off"),
            source::<PciSegmentConfig>("--pci-segment", "PciSegmentConfig", "pci_segment=0"),
            source::<RateLimitGroupConfig>(
                "--rate-limit-group",
                "RateLimitGroupConfig",
                "id=g,ops_size=1,ops_refill_time=1",
            ),
            source::<SerialConfig>("--serial", "SerialConfig", "off"),
            source::<RestoreConfig>("--restore", "RestoreConfig", "source_url=file:///d"),
            source::<LandlockConfig>("--landlock-rules", "LandlockConfig", "path=/p,access=r"),
        ])
        .collect()
}

/// Splits a help text into its sentences and the parts that the text lists.
fn split(help: &str) -> (String, Vec<Part>) {
    let text = help.split(" [default:").next().unwrap_or(help);
    let mut parts: Vec<Part> = Vec::new();
    let (mut first, mut end) = (None, text.len());
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let starts = at == 0 || b" [,|(".contains(&bytes[at - 1]);
        let key: String =
            text[at..].chars().take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_').collect();
        let value_at = at + key.len() + 1;
        let is_part =
            starts && !key.is_empty() && bytes.get(value_at - 1) == Some(&b'=') && bytes.get(value_at) != Some(&b' ');
        if !is_part {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        }
        let values = value(&text[value_at..]).trim_end_matches('.');
        at = value_at + values.len();
        first.get_or_insert(value_at - key.len() - 1);
        if !parts.iter().any(|part| part.key == key) {
            parts.push(Part { key, values: values.to_owned() });
            end = at;
        }
    }
    let before = first.map_or(text, |first| text[..first].trim_end_matches(['[', ',', ' ']));
    let before = before.trim_end_matches(':');
    // If the text after the parts starts with a lower-case letter, the text describes only one part. Drop the text, because the row of that
    // part already has a description.
    let after = text[end..].trim_start_matches([']', '.', ' ']);
    let is_sentence = !before.is_empty() && after.starts_with(char::is_uppercase);
    (if is_sentence { format!("{before}. {after}") } else { before.to_owned() }, parts)
}

/// Returns the value at the start of `text`. The value ends before a delimiter outside of brackets, or before another key.
fn value(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '[' if !text[at..].starts_with("[,") => depth += 1,
            '[' | ',' | ' ' | ';' | ')' if depth == 0 => return &text[..at],
            ']' if depth == 0 => return &text[..at],
            ']' => depth -= 1,
            '|' if depth == 0 => {
                let next: &str = text[at + 1..].split(['|', ',', ']', ' ']).next().unwrap_or_default();
                if next.contains('=') {
                    return &text[..at];
                }
            }
            _ => {}
        }
    }
    text
}

/// Returns the default value of a field in the notation of the command line.
fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".into(),
        Some(Value::Array(list)) if list.is_empty() => "none".into(),
        Some(Value::Bool(on)) => if *on { "`on`" } else { "`off`" }.into(),
        Some(Value::String(text)) if text == "Unknown" => "raw, after a check".into(),
        Some(Value::String(text)) => format!("`{}`", word(text)),
        Some(Value::Number(number)) => match number.as_u64() {
            Some(bytes) if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("`{}M`", bytes >> 20),
            _ => format!("`{number}`"),
        },
        Some(other) => panic!("cannot print the default {other}"),
    }
}

/// Converts a value of the API (`ByteRange`) to the notation of the command line (`byte-range`).
fn word(value: &str) -> String {
    let mut word = String::new();
    for (at, c) in value.char_indices() {
        if at > 0 && c.is_ascii_uppercase() {
            word.push('-');
        }
        word.push(c.to_ascii_lowercase());
    }
    word
}

/// Returns the entry of `list` for the part `key` of `option`.
fn special(list: &[(&'static str, &'static str, &'static str)], option: &str, key: &str) -> Option<&'static str> {
    list.iter().find(|(name, part, _)| (*name, *part) == (option, key)).map(|(_, _, value)| *value)
}

/// Returns the table row of a part.
fn row(source: &Source, schema: &Value, part: &Part, help: &str) -> String {
    let Part { key, values } = part;
    let field = special(RENAMED, source.option, key).unwrap_or(key);
    let rate = RATE_PARTS.iter().find(|(part, _)| part == key);
    let own = special(MEANINGS, source.option, key).or_else(|| rate.map(|(_, meaning)| *meaning));
    let meaning = match own {
        Some(meaning) => meaning,
        None => {
            let property = &schema["properties"][field];
            let description = property["description"].as_str().or_else(|| property["oneOf"][0]["description"].as_str());
            description.unwrap_or_else(|| panic!("{} {key}: the document describes no field {field}", source.option))
        }
    };
    let required = schema["required"].as_array().is_some_and(|required| required.iter().any(|name| *name == *field));
    let is_optional = help.contains(&format!("[{key}=")) || help.contains(&format!("[,{key}="));
    let is_sample = !values.contains('|') && values.starts_with(|c: char| c.is_ascii_digit() || c == '/');
    let is_required = required && !is_optional;
    let default = match (is_required, is_sample) {
        _ if let Some(default) = special(DEFAULTS, source.option, key) => default.into(),
        (true, _) => "required".into(),
        (false, true) => format!("`{values}`"),
        (false, false) => shown(source.minimal.get(field)),
    };
    let values = if is_sample { "" } else { values };
    table_row(key, values, &default, meaning)
}

fn table_row(key: &str, values: &str, default: &str, meaning: &str) -> String {
    let values = values.split('|').map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    let values = if values == "``" { String::new() } else { values };
    let meaning = meaning.replace('\n', " ").replace('|', "\\|");
    format!("| `{key}` | {values} | {default} | {meaning} |\n")
}

fn section(page: &mut String, argument: &Arg, sources: &[Source], document: &Value) {
    let option = format!("--{}", argument.get_long().unwrap());
    let help = argument.get_help().unwrap().to_string();
    let (about, mut parts) = split(&help);
    let about = about.split(": off, null").next().unwrap_or_default();
    for (name, key, values) in NOT_IN_HELP {
        if *name == option {
            parts.push(Part { key: (*key).into(), values: (*values).into() });
        }
    }
    let _ = write!(page, "## {option}\n{about}.\n\n| part | values | default | meaning |\n| --- | --- | --- | --- |\n");
    if ["--serial", "--console"].contains(&option.as_str()) {
        page.push_str(MODES);
    }
    let of_program: Vec<_> = PROGRAM_PARTS.iter().filter(|(name, ..)| *name == option).collect();
    for (_, key, values, default, meaning) in &of_program {
        page.push_str(&table_row(key, values, default, meaning));
    }
    if of_program.is_empty() {
        let source =
            sources.iter().find(|source| source.option == option).unwrap_or_else(|| panic!("{option}: no source"));
        let schema = &document["components"]["schemas"][&source.schema];
        let has_modes = ["--serial", "--console"].contains(&option.as_str());
        for part in parts.iter().filter(|part| !has_modes || !MODES.contains(&format!("`{}=", part.key))) {
            page.push_str(&row(source, schema, part, &help));
        }
    }
    page.push('\n');
}

fn page() -> String {
    let document = serde_json::to_value(document::generate()).unwrap();
    let sources = sources(&document);
    let command = Cli::command();
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set() && argument.get_help().is_some());
    let (with, without): (Vec<&Arg>, Vec<&Arg>) = shown.partition(|argument| {
        let option = argument.get_long().map(|name| format!("--{name}")).unwrap_or_default();
        sources.iter().any(|source| source.option == option) || PROGRAM_PARTS.iter().any(|(name, ..)| *name == option)
    });
    let mut page = HEAD.to_owned();
    page.push_str("## Options without parts\n| option | default | meaning |\n| --- | --- | --- |\n");
    for argument in without {
        let name = argument
            .get_long()
            .map_or_else(|| format!("-{}", argument.get_short().unwrap()), |name| format!("--{name}"));
        let values: Vec<&str> = argument.get_value_names().into_iter().flatten().map(|name| name.as_str()).collect();
        let takes_value = argument.get_action().takes_values();
        let name = if takes_value { format!("{name} {}", values.join(" ")) } else { name };
        let default = argument.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
        let default = match default {
            Some(text) if text.is_empty() => "empty".into(),
            Some(text) => format!("`{text}`"),
            None => if takes_value { "none" } else { "off" }.into(),
        };
        let help = argument.get_help().unwrap().to_string();
        let _ = writeln!(page, "| `{}` | {default} | {}. |", name.replace('|', "\\|"), help.replace('|', "\\|"));
    }
    page.push('\n');
    for argument in with {
        section(&mut page, argument, &sources, &document);
    }
    page.trim_end().to_owned() + "\n"
}

/// `CAROM_BLESS=1 cargo test -p carom-api option_page` writes the page.
#[test]
fn option_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/options.md");
    let page = page();
    if std::env::var_os("CAROM_BLESS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(stored == page, "docs/options.md is stale: run CAROM_BLESS=1 cargo test -p carom-api option_page");
}

#[test]
fn every_part_that_carom_accepts_is_on_the_page() {
    let page = page();
    let mut missing = Vec::new();
    for section in page.split("\n## --").skip(1) {
        let option = format!("--{}", section.lines().next().unwrap());
        let Err(CliOutcome::Mistake(mistake)) = parse(["carom", "--kernel", "k", "--landlock", &option, "zzz=1"])
        else {
            panic!("{option} accepts an unknown key");
        };
        let Some((_, known)) = mistake.split_once("known keys: ") else { continue };
        for key in known.split(", ").filter(|key| !ALIASES.contains(key)) {
            let is_shown = section.contains(&format!("| `{key}` |")) || section.contains(&format!("`{key}=PATH`"));
            if !is_shown {
                missing.push(format!("{option} {key}"));
            }
        }
    }
    assert_eq!(missing, ["--fs iommu", "--balloon iommu"], "these can only be off");
}

#[test]
fn help_splits_into_text_and_parts() {
    let part = |key: &str, values: &str| Part { key: key.into(), values: values.into() };
    let (text, parts) =
        split("RAM: size=SIZE[,shared=on|off][,affinity=[VCPU@[CPU,CPU],…]] [,max=N] [default: size=512M]");
    assert_eq!(text, "RAM");
    assert_eq!(
        parts,
        [part("size", "SIZE"), part("shared", "on|off"), part("affinity", "[VCPU@[CPU,CPU],…]"), part("max", "N")]
    );

    let (text, parts) =
        split("Socket: [tap=NAME|fd=N|fd=[N,N]][,vhost_user=on|off,socket=FILE]. Can be given several times");
    assert_eq!(text, "Socket. Can be given several times");
    assert_eq!(parts, [part("tap", "NAME"), part("fd", "N"), part("vhost_user", "on|off"), part("socket", "FILE")]);
}
