//! Compiles the table of system calls to programs for the kernel.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use pvrdma_base::threads::ThreadKind;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};
use thiserror::Error;

use super::calls::{self, Allowed, Condition, Group};
use super::profile::{Mismatch, Profile};

/// Reason why there is no filter.
#[derive(Debug, Error)]
pub(super) enum FilterError {
    /// The system calls of this processor architecture are unknown, or a program would be too long.
    #[error("{0}")]
    Compile(#[from] BackendError),
    /// The kernel does not support filters, or refused one.
    #[error("{0}")]
    Install(#[from] seccompiler::Error),
}

/// Permitted calls by number, each with alternative lists of conditions. Without a list the call is always permitted.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Filters of a process. The kernel runs all programs of a thread and applies the strictest result.
#[derive(Debug)]
pub(super) struct Filters {
    base: Vec<BpfProgram>,
    kinds: Vec<(ThreadKind, Vec<BpfProgram>)>,
}

impl Filters {
    /// Compiles all programs. Must be called in the process that uses them, because they contain its process ID.
    pub(super) fn compile(profile: Profile, mismatch: Mismatch) -> Result<Self, FilterError> {
        let base = programs(&calls::base(profile), mismatch, true)?;
        let refused = !calls::base(profile).iter().any(|group| group.looks());
        let kinds = ThreadKind::ALL.into_iter().filter(|kind| *kind != ThreadKind::Launcher);
        let kinds = kinds.map(|kind| Ok((kind, programs(&calls::groups(profile, kind), mismatch, !refused)?)));
        Ok(Self { base, kinds: kinds.collect::<Result<_, FilterError>>()? })
    }

    /// Installs the filter of all threads. The other threads must be started by this one, to inherit it.
    pub(super) fn install_base(&self) -> Result<(), FilterError> {
        install(&self.base)
    }

    /// Installs the additional filter of a kind of thread.
    pub(super) fn install(&self, kind: ThreadKind) -> Result<(), FilterError> {
        self.kinds.iter().find(|(listed, _)| *listed == kind).map_or(Ok(()), |(_, programs)| install(programs))
    }
}

/// Installs the whole filter of a fallback server.
pub(super) fn confine_alone(mismatch: Mismatch) -> Result<(), FilterError> {
    install(&programs(&calls::alone(), mismatch, true)?)
}

/// Installs the whole filter of a keeper.
pub(super) fn confine_keeper(mismatch: Mismatch) -> Result<(), FilterError> {
    install(&programs(&calls::keeper(), mismatch, true)?)
}

fn install(programs: &[BpfProgram]) -> Result<(), FilterError> {
    programs.iter().try_for_each(|program| Ok(apply_filter(program)?))
}

/// Returns the programs of threads with these groups. With `refuse_lookups`, no earlier program refuses lookups, so one
/// of these must do so if the groups do not permit them.
fn programs(groups: &[&Group], mismatch: Mismatch, refuse_lookups: bool) -> Result<Vec<BpfProgram>, FilterError> {
    let mut programs = Vec::new();
    let mut allowed = Rules::new();
    for group in groups {
        add(&mut allowed, group)?;
    }
    if !groups.iter().any(|group| group.looks()) {
        if refuse_lookups {
            programs.push(refuse(calls::lookups(), libc::EACCES)?);
        }
        // The separate program refuses these calls, and its result is stricter.
        allowed.extend(calls::lookups().map(|call| (call, Vec::new())));
    }
    if groups.iter().any(|group| group.starts_threads()) {
        // The C library falls back to `clone`, whose flags a filter can see.
        programs.push(refuse([libc::SYS_clone3].into_iter(), libc::ENOSYS)?);
    }
    let unknown = match mismatch {
        Mismatch::Refuse => errno(libc::EPERM),
        Mismatch::Kill => SeccompAction::KillProcess,
    };
    programs.push(compile(allowed, unknown, SeccompAction::Allow)?);
    Ok(programs)
}

/// Returns a program that refuses these calls and permits all others.
fn refuse(calls: impl Iterator<Item = i64>, error: i32) -> Result<BpfProgram, FilterError> {
    compile(calls.map(|call| (call, Vec::new())).collect(), SeccompAction::Allow, errno(error))
}

fn compile(rules: Rules, mismatched: SeccompAction, matched: SeccompAction) -> Result<BpfProgram, FilterError> {
    Ok(SeccompFilter::new(rules, mismatched, matched, ARCH.try_into()?)?.try_into()?)
}

const fn errno(error: i32) -> SeccompAction {
    SeccompAction::Errno(error.unsigned_abs())
}

/// Adds the calls of a group to the permitted calls.
fn add(rules: &mut Rules, group: &Group) -> Result<(), FilterError> {
    for call in group.calls {
        let always = rules.get(&call.number).is_some_and(Vec::is_empty);
        match call.allowed {
            Allowed::Always => {
                rules.insert(call.number, Vec::new());
            }
            Allowed::When(..) if always => {}
            Allowed::When(lists, _) => {
                let rule =
                    |list: &&[Condition]| SeccompRule::new(list.iter().map(condition).collect::<Result<_, _>>()?);
                let new = lists.iter().map(rule).collect::<Result<Vec<_>, _>>()?;
                rules.entry(call.number).or_default().extend(new);
            }
        }
    }
    Ok(())
}

fn condition(condition: &Condition) -> Result<SeccompCondition, BackendError> {
    let (argument, width, compare, value) = match *condition {
        Condition::Bits { argument, mask, value } => {
            (argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask.into()), value.into())
        }
        Condition::Is { argument, value } => (argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value.into()),
        Condition::Null { argument } => (argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0),
        Condition::OwnProcess { argument } => {
            (argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, std::process::id().into())
        }
    };
    SeccompCondition::new(argument, width, compare, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_programs_compile_and_a_kind_has_no_call_that_the_launcher_has_not() {
        for profile in [Profile::Rxe, Profile::RxeAddressed, Profile::Ibverbs] {
            Filters::compile(profile, Mismatch::Refuse).unwrap();
            Filters::compile(profile, Mismatch::Kill).unwrap();
            let mut base = Rules::new();
            calls::base(profile).iter().try_for_each(|group| add(&mut base, group)).unwrap();
            for kind in ThreadKind::ALL {
                let mut rules = Rules::new();
                calls::groups(profile, kind).iter().try_for_each(|group| add(&mut rules, group)).unwrap();
                for (call, lists) in rules {
                    // A call that the launcher's filter refuses is refused in its children, too, whatever their own
                    // filter permits.
                    let allowed = base.get(&call).is_some_and(|base| {
                        base.is_empty() || !lists.is_empty() && lists.iter().all(|list| base.contains(list))
                    });
                    assert!(allowed, "{profile:?}, {kind}: system call {call}");
                }
            }
        }
    }

    #[test]
    fn a_call_that_is_always_allowed_stays_so() {
        static SOME: Group = Group { name: "some", purpose: "", calls: &[CALLS[0]] };
        static ALL: Group = Group { name: "all", purpose: "", calls: &[CALLS[1]] };
        const CALLS: [calls::Call; 2] = [
            calls::Call { name: "mmap", number: 9, allowed: Allowed::When(&[&[Condition::Null { argument: 0 }]], "") },
            calls::Call { name: "mmap", number: 9, allowed: Allowed::Always },
        ];
        for groups in [[&SOME, &ALL], [&ALL, &SOME], [&ALL, &ALL]] {
            let mut rules = Rules::new();
            groups.iter().try_for_each(|group| add(&mut rules, group)).unwrap();
            assert_eq!(rules.get(&9).map(Vec::len), Some(0));
        }
        let mut rules = Rules::new();
        [&SOME, &SOME].iter().try_for_each(|group| add(&mut rules, group)).unwrap();
        assert_eq!(rules.get(&9).map(Vec::len), Some(2));
    }
}
