//! An engine's decode loop in Rust, loaded into a Python process: no crate, no call of Python in a step.

mod kvpool;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// Make decode steps and add up the slots that were written.
///
/// Returns 0, or not 0 with a Python exception set.
///
/// # Safety
/// The caller holds the GIL; `pool` and `plan` are Python objects, `handles` has `rows` elements.
#[no_mangle]
pub unsafe extern "C" fn decode(
    pool: *mut c_void,
    plan: *mut c_void,
    handles: *const i64,
    rows: i64,
    steps: i64,
    sum: *mut i64,
) -> c_int {
    let Some(kv) = kvpool::import() else { return -1 };
    let status = run(kv, pool, plan, std::slice::from_raw_parts(handles, rows as usize), steps, &mut *sum);
    if let Err(status) = status {
        (kv.raise_error)();
        return status;
    }
    0
}

unsafe fn run(
    kv: &kvpool::Api,
    pool: *mut c_void,
    plan: *mut c_void,
    handles: &[i64],
    steps: i64,
    sum: &mut i64,
) -> Result<(), c_int> {
    let (mut kv_pool, mut kv_plan) = (null_mut(), null_mut());
    let mut slots = kvpool::Array { data: null(), length: 0, width: 0, itemsize: 0 };
    check((kv.pool_from)(pool, &mut kv_pool))?;
    check((kv.plan_from)(plan, &mut kv_plan))?;
    for _ in 0..steps {
        check((kv.step)(kv_pool, kv_plan, handles.as_ptr(), null(), handles.len() as i64, 0))?;
        check((kv.array)(kv_plan, kvpool::SLOT_MAPPING, &mut slots))?;
        // your kernels run here
        let written = std::slice::from_raw_parts(slots.data as *const i32, slots.length as usize);
        *sum += written.iter().map(|&slot| slot as i64).sum::<i64>();
        check((kv.done)(kv_pool, kv_plan))?;
    }
    Ok(())
}

fn check(status: c_int) -> Result<(), c_int> {
    if status == 0 { Ok(()) } else { Err(status) }
}
