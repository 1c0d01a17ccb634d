// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Lines of the log as `--log-format` says.

use std::io::{self, Write};
use std::time::Instant;

use carom_api::cli::{LogFormat, LogPart, LogZone};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use log::{Level, Record};

/// Text after the number of dropped lines.
const DROPPED: &str = " lines dropped: the log was not read in time, or could not be written";

/// The line that reports dropped lines, in the format that the log has without `--log-format`.
pub fn notice(count: u64) -> Vec<u8> {
    format!("[{:.0} WARN ] {count}{DROPPED}\n", Timestamp::now()).into_bytes()
}

/// Writes lines of one format.
pub struct LogLines {
    format: LogFormat,
    start: Instant,
    /// Looked up once: later the process may not reach the file that says it.
    local: TimeZone,
}

impl LogLines {
    /// Lines of a program that starts now.
    pub fn new(format: LogFormat) -> Self {
        Self { format, start: Instant::now(), local: TimeZone::try_system().unwrap_or(TimeZone::UTC) }
    }

    /// Writes the line of a record.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write, record: &Record<'_>) -> io::Result<()> {
        // All that tells the time of a line tells the same.
        let now = Timestamp::now();
        for part in &self.format.0 {
            match part {
                LogPart::Text(text) => out.write_all(text.as_bytes())?,
                LogPart::BootTime => write!(out, "{:10.6}", self.start.elapsed().as_secs_f64())?,
                LogPart::WallClock => write!(out, "{now:.6}")?,
                LogPart::Time(zone, form) => write!(out, "{}", self.zoned(now, *zone).strftime(form))?,
                LogPart::Pid => write!(out, "{}", std::process::id())?,
                LogPart::Tid => write!(out, "{}", rustix::thread::gettid())?,
                LogPart::Thread => write!(out, "{}", std::thread::current().name().unwrap_or("anonymous"))?,
                LogPart::Level => write!(out, "{}", record.level())?,
                LogPart::LevelLetter => write!(out, "{:.1}", record.level().as_str())?,
                LogPart::Location => match (record.file(), record.line()) {
                    (Some(file), Some(line)) => write!(out, "{file}:{line}")?,
                    _ => out.write_all(record.target().as_bytes())?,
                },
                LogPart::Message => write!(out, "{}", record.args())?,
            }
        }
        writeln!(out)
    }

    /// The line that reports dropped lines.
    pub fn notice(&self, count: u64) -> Vec<u8> {
        let mut line = Vec::new();
        let mut record = Record::builder();
        record.level(Level::Warn).target(module_path!()).file(Some(file!())).line(Some(line!()));
        // Writing to memory does not fail.
        let _ = self.write(&mut line, &record.args(format_args!("{count}{DROPPED}")).build());
        line
    }

    fn zoned(&self, now: Timestamp, zone: LogZone) -> Zoned {
        match zone {
            LogZone::Utc => now.to_zoned(TimeZone::UTC),
            LogZone::Local => now.to_zoned(self.local.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(format: &str) -> String {
        let mut out = Vec::new();
        let mut builder = Record::builder();
        let record = builder.level(Level::Info).target("t").file(Some("f.rs")).line(Some(7));
        LogLines::new(format.parse().unwrap())
            .write(&mut out, &record.args(format_args!("said {}", 1)).build())
            .unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn tokens_stand_for_what_the_record_has() {
        assert_eq!(line("{{{level} {levelchar}}} {location} -- {msg}"), "{INFO I} f.rs:7 -- said 1\n");
        assert_eq!(line("{pid}"), format!("{}\n", std::process::id()));
        assert_eq!(line("{thread}"), format!("{}\n", std::thread::current().name().unwrap()));
        assert!(line("{tid}").trim().parse::<u32>().is_ok());
    }

    #[test]
    fn dropped_lines_are_reported_in_the_format_of_the_others() {
        let lines = LogLines::new("{levelchar} {location} {msg}".parse().unwrap());
        let line = String::from_utf8(lines.notice(7)).unwrap();
        assert!(line.starts_with("W ") && line.contains(".rs:") && line.ends_with("written\n"), "{line}");
        assert!(line.contains(" 7 lines dropped: "), "{line}");
        let line = String::from_utf8(notice(8)).unwrap();
        assert!(line.starts_with("[2") && line.contains("Z WARN ] 8 lines dropped: "), "{line}");
    }

    #[test]
    fn times_have_their_forms() {
        let is_like = |text: &str, form: &str| {
            let alike = |(c, of): (char, char)| if of == '0' { c.is_ascii_digit() } else { c == of };
            text.len() == form.len() && text.chars().zip(form.chars()).all(alike)
        };
        for (format, form) in [
            ("{wallclock}", "0000-00-00T00:00:00.000000Z\n"),
            ("{glog}", "0000 00:00:00.000000\n"),
            ("{year}-{month}-{day}", "0000-00-00\n"),
            ("{hour}:{minute}:{second}.{micros} {offset}", "00:00:00.000000 +00:00\n"),
        ] {
            let text = line(format);
            assert!(is_like(&text, form), "{format}: {text}");
        }
        assert!(is_like(&line("{boottime}"), "  0.000000\n"), "{}", line("{boottime}"));
        assert!(is_like(&line("{localglog}"), "0000 00:00:00.000000\n"));
    }
}
