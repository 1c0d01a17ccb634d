// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Serial port on carom's own terminal. The terminal is raw while the guest runs, and its modes are restored however the VM
//! ends. Typed text reaches the guest.

use carom_integration::harness::guest_test;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use carom_integration::{Ended, Guest, Limits, run_limited};
use tempfile::TempDir;

use crate::support::SITE;

/// Runs a shell script on a separate terminal, and returns the terminal's output. In the script, `$CAROM` starts the guest and
/// `$D` is `dir`.
fn on_terminal(guest: &Guest, dir: &Path, script: &str) -> String {
    let command = guest.write_command(&SITE, dir).unwrap_or_else(|error| panic!("{error:#}"));
    let file = dir.join("script");
    fs::write(&file, format!("CAROM='{}'\nD='{}'\n{script}", command.display(), dir.display())).unwrap();
    let inner = format!("sh '{}'", file.display());
    let mut outer = Command::new("sh");
    // Type the text repeatedly, because the booting guest cannot read it at first.
    outer.args([
        "-c",
        "for i in $(seq 40); do sleep 1; printf 'hello\\r'; done | script -qec \"$1\" /dev/null",
        "sh",
        &inner,
    ]);
    let limits = Limits { time: Duration::from_secs(90), stop_on_panic: true };

    let finished = run_limited(&mut outer, &dir.join("terminal"), limits, None).unwrap();

    assert!(matches!(finished.ended, Ended::Exited(status) if status.success()), "{finished:?}");
    finished.stdout
}

#[guest_test]
fn modes_are_restored_after_power_off_and_after_a_signal() {
    let [powered_off, signalled] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let modes = |dir: &TempDir, name: &str| fs::read_to_string(dir.path().join(name)).unwrap();

    on_terminal(
        &Guest::new("terminal-power-off"),
        powered_off.path(),
        "stty -a >$D/before; $CAROM; stty -a >$D/after\n",
    );
    // The script sends each signal when the terminal is raw.
    on_terminal(
        &Guest::new("terminal-signals").job("sleep 1000\n"),
        signalled.path(),
        "for signal in TERM INT; do\n\
             stty -a >$D/before\n\
             (until stty -a </dev/tty | tee $D/during-$signal | grep -q -e -icanon; do sleep 0.1; done; kill -$signal $(cat $D/pid)) &\n\
             sh -c \"echo \\$\\$ >$D/pid; exec $CAROM\"; echo $? >$D/status-$signal; wait; stty -a >$D/after-$signal\n\
         done\n",
    );

    assert!(modes(&powered_off, "before").contains(" icanon"), "{}", modes(&powered_off, "before"));
    assert_eq!(modes(&powered_off, "after"), modes(&powered_off, "before"));
    for signal in ["TERM", "INT"] {
        let of = |name: &str| modes(&signalled, &format!("{name}-{signal}"));
        assert!(of("during").contains("-icanon"), "{signal}: {}", of("during"));
        assert_eq!(of("status"), "0\n", "{signal}");
        assert_eq!(of("after"), modes(&signalled, "before"), "{signal}");
    }
}

#[guest_test]
fn typed_text_reaches_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    // Read three lines: the first line may lack its beginning, which is lost while the guest's driver initializes the port.
    let guest = Guest::new("terminal-input")
        .job("for i in 1 2 3; do read -r line; echo \"CAROM-READ $line\"; done </dev/console\n");

    let shown = on_terminal(&guest, dir.path(), "$CAROM\n");

    assert!(shown.contains("CAROM-READ hello"), "{shown}");
}
