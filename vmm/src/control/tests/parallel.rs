// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of calls that several clients make at the same time.

use std::collections::HashSet;
use std::sync::Barrier;
use std::time::Instant;

use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

/// A client's request and its outcome.
#[derive(Clone, Copy, Debug)]
enum Answered {
    Step(Step, Result<(), Refusal>),
    /// State that `vm.info` returned, if a VM existed.
    State(Option<VmState>),
}

/// True if the model has the same outcomes for some order of all requests. `at` is the index of each client's next
/// request.
fn is_explained(
    clients: &[Vec<Answered>],
    at: &mut Vec<usize>,
    model: Model,
    seen: &mut HashSet<(Vec<usize>, Model)>,
) -> bool {
    if clients.iter().zip(&*at).all(|(client, at)| client.len() == *at) {
        return true;
    }
    if !seen.insert((at.clone(), model)) {
        return false;
    }
    (0..clients.len()).any(|client| {
        let mut next = model;
        let fits = match clients[client].get(at[client]) {
            Some(Answered::Step(step, outcome)) => next.step(*step) == *outcome,
            Some(Answered::State(state)) => model.state.map(reported) == *state,
            None => false,
        };
        if !fits {
            return false;
        }
        at[client] += 1;
        let explained = is_explained(clients, at, next, seen);
        at[client] -= 1;
        explained
    })
}

#[test]
fn calls_in_parallel_have_the_outcomes_of_some_order() {
    const ROUNDS: usize = 300;
    let control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    let handle = control.handle();
    let calls: Vec<Option<Step>> =
        STEPS.into_iter().filter(|step| call_of(*step).is_some()).map(Some).chain([None; 3]).collect();
    let of_all = prop::collection::vec(prop::collection::vec(prop::sample::select(calls), 6), 4);
    let end = thread::spawn(move || {
        let mut runner = TestRunner::deterministic();
        let mut wrong = Vec::new();
        for _ in 0..ROUNDS {
            let plan = of_all.new_tree(&mut runner).unwrap().current();
            call(&handle, Call::Delete).unwrap();
            let together = Barrier::new(plan.len());
            let did: Vec<Vec<Answered>> = thread::scope(|scope| {
                let clients: Vec<_> = plan
                    .into_iter()
                    .map(|steps| {
                        let (handle, together) = (&handle, &together);
                        scope.spawn(move || {
                            together.wait();
                            steps.into_iter().map(|step| ask(handle, step)).collect()
                        })
                    })
                    .collect();
                clients.into_iter().map(|client| client.join().unwrap()).collect()
            });
            if !is_explained(&did, &mut vec![0; did.len()], Model::default(), &mut HashSet::new()) {
                wrong.push(did);
            }
        }
        call(&handle, Call::ShutdownVmm).unwrap();
        wrong
    });
    control.run().unwrap();
    let wrong = end.join().unwrap();
    assert!(wrong.is_empty(), "no order explains {} of {ROUNDS} rounds; the first: {:?}", wrong.len(), wrong[0]);
}

/// Makes the call that does `step`, and returns its outcome. If `step` is `None`, returns the state of the VM as `vm.info` does.
fn ask(handle: &ControlHandle, step: Option<Step>) -> Answered {
    match step {
        Some(step) => {
            let outcome = call(handle, call_of(step).expect("only calls are asked for"));
            Answered::Step(step, outcome.map(drop).map_err(|error| refusal(&error)))
        }
        // Like the API's server, read the state without a call if possible.
        None => Answered::State(match handle.info_soon().unwrap_or_else(|| call(handle, Call::Info)) {
            Ok(Reply::Info(info)) => Some(info.state),
            Err(ControlError::NotCreated) => None,
            other => panic!("{other:?}"),
        }),
    }
}

#[test]
fn vm_info_is_read_off_the_control_thread_unless_busy() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    let handle = control.handle();
    assert!(handle.info_soon().is_none(), "the control thread does not serve yet");
    control.create(config("")).unwrap();
    let end = thread::spawn(move || {
        let state = |expected: Option<VmState>| {
            // The control thread may still be starting. Until it waits for messages, `info_soon` may give no answer.
            let start = Instant::now();
            let outcome = loop {
                match handle.info_soon() {
                    Some(outcome) => break outcome,
                    None => assert!(start.elapsed() < Duration::from_secs(60), "no answer in 60 s"),
                }
                thread::yield_now();
            };
            match (outcome, expected) {
                (Ok(Reply::Info(info)), Some(state)) => assert_eq!(info.state, state),
                (Err(ControlError::NotCreated), None) => {}
                other => panic!("{other:?}"),
            }
        };
        state(Some(VmState::Created));
        call(&handle, Call::Boot).unwrap();
        state(Some(VmState::Running));
        call(&handle, Call::Delete).unwrap();
        state(None);
        call(&handle, Call::Create(Box::new(config("busy")))).unwrap();
        call(&handle, Call::Boot).unwrap();
        for _ in 0..1000 {
            assert!(handle.info_soon().is_none(), "its IOMMU is busy");
        }
        assert!(matches!(call(&handle, Call::Info), Ok(Reply::Info(info)) if info.state == VmState::Running));
        call(&handle, Call::ShutdownVmm).unwrap();
        handle
    });
    control.run().unwrap();
    assert!(end.join().unwrap().info_soon().is_none(), "the control thread has ended");
}

#[test]
fn answers_without_a_valid_order_are_not_explained() {
    let boot = |outcome| Answered::Step(Step::Boot, outcome);
    let explained = |clients: &[Vec<Answered>]| {
        is_explained(clients, &mut vec![0; clients.len()], Model::default(), &mut HashSet::new())
    };
    let create = Answered::Step(Step::Create, Ok(()));
    assert!(explained(&[vec![boot(Ok(()))], vec![create]]));
    assert!(explained(&[vec![boot(Err(Refusal::NotCreated))], vec![create]]));
    assert!(!explained(&[vec![boot(Ok(()))], vec![create, Answered::State(None)]]));
    assert!(!explained(&[vec![boot(Ok(())), boot(Ok(()))], vec![create]]));
}

#[test]
fn parallel_calls_are_each_answered_until_the_vmm_ends() {
    const CLIENTS: usize = 16;
    let control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    let handle = control.handle();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let handle = handle.clone();
            thread::spawn(move || {
                let mut done = 0;
                for round in 0..200 {
                    let wanted = match (client + round) % 8 {
                        0 => Call::Create(Box::new(config(""))),
                        1 => Call::Boot,
                        2 => Call::Pause,
                        3 => Call::Resume,
                        4 => Call::Reboot,
                        5 => Call::Shutdown,
                        6 => Call::Delete,
                        _ => Call::Info,
                    };
                    match call(&handle, wanted) {
                        Ok(_) => done += 1,
                        Err(error) => drop(refusal(&error)),
                    }
                }
                done
            })
        })
        .collect();
    let end = thread::spawn(move || {
        let done: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        // An eighth of the calls delete the VM, which always succeeds.
        assert!(done >= CLIENTS * 200 / 8, "{done}");
        call(&handle, Call::ShutdownVmm).unwrap();
        // After the end of the VMM, calls fail with the error `Ending`.
        loop {
            match call(&handle, Call::Info) {
                Err(ControlError::Ending) => break,
                Err(ControlError::NotCreated) => thread::yield_now(),
                other => panic!("{other:?}"),
            }
        }
    });
    control.run().unwrap();
    end.join().unwrap();
}
