// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.resize`.

use std::io::{Read, Seek};

use super::*;

#[test]
fn resize_is_told_of_a_vm_that_is_booted_and_stays_what_it_is() {
    let mut file = tempfile::tempfile().unwrap();
    let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
    let mut control = Control::<Null>::new(monitor.clone(), Options::default());
    let resize = |bytes| Call::Resize(VmResize { desired_ram: Some(bytes), ..VmResize::default() });
    control.create(config("")).unwrap();
    control.serve_call(resize(128 << 20)).unwrap();
    control.boot().unwrap();
    control.serve_call(resize(128 << 20)).unwrap();
    control.serve_call(resize(256 << 20)).unwrap_err();
    monitor.flush(Duration::from_secs(20));
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["event"].take());
    let wanted = ["booting", "booted", "resizing", "resized"];
    assert_eq!(events.collect::<Vec<_>>(), wanted);
    control.delete();
}

#[test]
fn ram_comes_to_a_guest_within_its_room_and_stays_what_it_is_where_none_comes() {
    let monitor = EventMonitor::new(tempfile::tempfile().unwrap()).unwrap();
    let mut control = Control::<Null>::new(monitor, Options::default());
    let size = |control: &mut Control<Null>| control.created.as_ref().unwrap().config.memory.size >> 20;
    let resize = |control: &mut Control<Null>, mib: u64| {
        let resized =
            control.serve_call(Call::Resize(VmResize { desired_ram: Some(mib << 20), ..VmResize::default() }));
        resized.map(|_| ()).map_err(|error| error.to_string())
    };
    let wanted = |cmdline| {
        let mut config = unchecked(cmdline);
        config.memory.hotplug_size = 256 << 20;
        config.check().unwrap()
    };
    control.create(wanted("")).unwrap();
    control.boot().unwrap();
    let booted = size(&mut control);
    resize(&mut control, booted + 128).unwrap();
    assert_eq!(size(&mut control), booted + 128);
    assert!(resize(&mut control, booted).unwrap_err().contains("which it keeps while it runs"));
    assert!(resize(&mut control, booted + 384).unwrap_err().ends_with("memory.hotplug_size leaves 134217728"));
    resize(&mut control, booted + 256).unwrap();
    assert_eq!(size(&mut control), booted + 256);
    control.delete();
    control.create(wanted("fail-ram")).unwrap();
    control.boot().unwrap();
    assert_eq!(resize(&mut control, booted + 128), Err("adding RAM: none is left".into()));
    assert_eq!(size(&mut control), booted);
    control.delete();
}
