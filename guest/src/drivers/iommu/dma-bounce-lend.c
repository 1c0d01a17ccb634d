// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce memory lent to applications
 *
 * An application can avoid the copies of large transfers: it maps /dev/iommu_bounce/DEVICE, and
 * gets chunks of the memory that stays mapped for that device. Buffers in this memory already have
 * an address for the device. So direct I/O with them, also by io_uring, needs no request to the
 * IOMMU and no copy. The device reaches the lent memory, and no other memory of the application.
 *
 * See dma-bounce-loan.c for when the memory is given back.
 *
 * Lent memory needs page structures. For windows, they are made when a file is first opened.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/cdev.h>
#include <linux/cleanup.h>
#include <linux/device.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rwsem.h>
#include <linux/slab.h>

#include "dma-bounce-lend.h"
#include "dma-bounce-loan.h"
#include "dma-bounce-pool.h"

DEFINE_STATIC_KEY_FALSE(dma_bounce_lend_key);

/**
 * struct dma_bounce_lender - the file of a device that lends memory
 * @node:	device node of the file
 * @cdev:	character device with the operations of the file
 * @list:	entry in the list of all lenders
 * @dev:	device whose pool lends memory
 * @pool:	pool of @dev's domain or NULL. It is stable while lend_sem or lend_lock is held.
 */
struct dma_bounce_lender {
	struct device		node;
	struct cdev		cdev;
	struct list_head	list;
	struct device		*dev;
	struct dma_bounce_pool	*pool;
};

#define DMA_BOUNCE_LENDERS	(MINORMASK + 1)

/*
 * Writers of the list of lenders hold both locks. lend_lock nests inside the lock of an
 * application's memory map, and outside the pools' mutexes. Pages are made under lend_sem, which
 * must not be taken inside the lock of a memory map.
 */
static DECLARE_RWSEM(lend_sem);
static DEFINE_MUTEX(lend_lock);
static LIST_HEAD(lenders);
/* Serialises making pages for the pools' regions */
static DEFINE_MUTEX(region_lock);
static DEFINE_IDA(lend_minors);
static dev_t lend_major;

/* The files */

static struct dma_bounce_lender *lender_of(struct file *file)
{
	return container_of(file_inode(file)->i_cdev, struct dma_bounce_lender, cdev);
}

static void loan_open(struct vm_area_struct *vma)
{
	struct dma_bounce_loan *loan = vma->vm_private_data;

	refcount_inc(&loan->refs);
	atomic_inc(&loan->mappings);
}

static void loan_close(struct vm_area_struct *vma)
{
	struct dma_bounce_lender *lender = lender_of(vma->vm_file);
	struct dma_bounce_loan *loan = vma->vm_private_data;

	if (atomic_dec_and_test(&loan->mappings)) {
		/* Do not let an exiting process wait: the pool looks at its loans regularly. */
		if (mutex_trylock(&lend_lock)) {
			if (lender->pool)
				dma_bounce_pool_retry(lender->pool);
			mutex_unlock(&lend_lock);
		}
	}
	dma_bounce_loan_put(loan);
}

/* Maps all pages of the faulting address's chunk. */
static vm_fault_t loan_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct dma_bounce_loan *loan = vma->vm_private_data;
	unsigned long page = vmf->pgoff - (loan->start >> PAGE_SHIFT), first, i, addr;
	unsigned long n = page / loan->per_chunk;
	int ret;

	guard(mutex)(&loan->lock);
	if (loan->stopped || n >= loan->nchunks)
		return VM_FAULT_SIGBUS;
	/* The address of the chunk's first page wraps around if it is not in this mapping. */
	first = (vmf->address & PAGE_MASK) - ((page % loan->per_chunk) << PAGE_SHIFT);
	for (i = 0; i < loan->per_chunk; i++) {
		addr = first + (i << PAGE_SHIFT);
		if (addr < vma->vm_start || addr >= vma->vm_end)
			continue;
		ret = vm_insert_page(vma, addr, dma_bounce_loan_page(loan, n, i));
		/* A page may still be mapped, or another thread has just mapped it. */
		if (ret && ret != -EBUSY)
			return vmf_error(ret);
	}
	return VM_FAULT_NOPAGE;
}

static const struct vm_operations_struct loan_vm_ops = {
	.open	= loan_open,
	.close	= loan_close,
	.fault	= loan_fault,
};

static int lend_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct dma_bounce_lender *lender = lender_of(file);
	u64 len = vma->vm_end - vma->vm_start;
	struct dma_bounce_pool *pool;
	struct dma_bounce_loan *loan;
	u64 nchunks;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	guard(mutex)(&lend_lock);
	pool = lender->pool;
	if (!pool)
		return -ENODEV;
	scoped_guard(mutex, &pool->slots.mutex) {
		/* The file may have been opened when the device had another pool. */
		if (!pool->active || !pool->slots.len || !smp_load_acquire(&pool->loan_ops))
			return -ENODEV;
		dma_bounce_loans_reap(pool);
		nchunks = DIV_ROUND_UP_ULL(len >> PAGE_SHIFT,
					   dma_bounce_loan_per_chunk(pool));
		if (nchunks > pool->budget >> pool->slots.chunk_shift)
			return -ENOMEM;
		loan = dma_bounce_loan_make(pool, file, nchunks);
		if (IS_ERR(loan))
			return PTR_ERR(loan);
	}
	vma->vm_pgoff = loan->start >> PAGE_SHIFT;
	/* Page faults insert the pages. */
	vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP | VM_MIXEDMAP);
	vma->vm_private_data = loan;
	vma->vm_ops = &loan_vm_ops;
	return 0;
}

/* Makes pages for the memory that can be lent, if it has none yet. */
static int lend_open(struct inode *inode, struct file *file)
{
	struct dma_bounce_lender *lender = lender_of(file);
	struct dma_bounce_region region = {};
	struct dma_bounce_pool *pool;
	int ret;

	guard(rwsem_read)(&lend_sem);
	pool = lender->pool;
	if (!pool)
		return -ENODEV;
	guard(mutex)(&region_lock);
	if (pool->region.len)
		return 0;
	ret = pool->ops->lend(pool->domain, &region);
	if (ret)
		return ret;
	pool->region = region;
	smp_store_release(&pool->loan_ops, &dma_bounce_loan_ops);	/* pairs with lend_mmap() */
	static_branch_enable(&dma_bounce_lend_key);
	return 0;
}

static const struct file_operations lend_fops = {
	.owner	= THIS_MODULE,
	.open	= lend_open,
	.mmap	= lend_mmap,
	.llseek	= noop_llseek,
};

static char *lend_devnode(const struct device *node, umode_t *mode)
{
	return kasprintf(GFP_KERNEL, "iommu_bounce/%s", dev_name(node));
}

static const struct class lend_class = {
	.name		= "iommu_bounce",
	.devnode	= lend_devnode,
};

static void lender_release(struct device *node)
{
	struct dma_bounce_lender *lender = container_of(node, struct dma_bounce_lender, node);

	ida_free(&lend_minors, MINOR(node->devt));
	kfree(lender);
}

static struct dma_bounce_lender *lender_find(struct device *dev)
{
	struct dma_bounce_lender *lender;

	list_for_each_entry(lender, &lenders, list)
		if (lender->dev == dev)
			return lender;
	return NULL;
}

static struct dma_bounce_lender *lender_make(struct device *dev)
{
	struct dma_bounce_lender *lender = kzalloc(sizeof(*lender), GFP_KERNEL);
	int minor;

	if (!lender)
		return NULL;
	minor = ida_alloc_max(&lend_minors, DMA_BOUNCE_LENDERS - 1, GFP_KERNEL);
	if (minor < 0) {
		kfree(lender);
		return NULL;
	}
	INIT_LIST_HEAD(&lender->list);
	device_initialize(&lender->node);
	lender->node.class = &lend_class;
	lender->node.release = lender_release;
	lender->node.devt = MKDEV(MAJOR(lend_major), minor);
	lender->dev = dev;
	cdev_init(&lender->cdev, &lend_fops);
	lender->cdev.owner = THIS_MODULE;
	if (dev_set_name(&lender->node, "%s", dev_name(dev)) ||
	    cdev_device_add(&lender->cdev, &lender->node)) {
		put_device(&lender->node);
		return NULL;
	}
	return lender;
}

/**
 * dma_bounce_lender_set - set the pool that a device lends from, after a change of its domain
 * @dev: the device
 * @pool: the pool of the new domain, or NULL
 */
void dma_bounce_lender_set(struct device *dev, struct dma_bounce_pool *pool)
{
	struct dma_bounce_lender *lender;

	/* Without ZONE_DEVICE, the kernel cannot make pages for memory that is not RAM. */
	if (!IS_ENABLED(CONFIG_ZONE_DEVICE) || !lend_major)
		return;
	guard(rwsem_write)(&lend_sem);
	if (pool && !pool->ops->lend)
		pool = NULL;
	lender = lender_find(dev);
	/*
	 * Add the device node without lend_lock. That waits for the lock of the node's directory,
	 * whose holder may wait for a memory map, and a memory map's holder may wait for lend_lock.
	 */
	if (!lender && pool)
		lender = lender_make(dev);
	if (!lender)
		return;
	guard(mutex)(&lend_lock);
	if (list_empty(&lender->list))
		list_add(&lender->list, &lenders);
	lender->pool = pool;
}

/**
 * dma_bounce_lender_del - remove the file of a device that leaves its IOMMU
 * @dev: the device
 */
void dma_bounce_lender_del(struct device *dev)
{
	struct dma_bounce_lender *lender;

	scoped_guard(rwsem_write, &lend_sem) {
		guard(mutex)(&lend_lock);
		lender = lender_find(dev);
		if (!lender)
			return;
		list_del(&lender->list);
		lender->pool = NULL;
	}
	cdev_device_del(&lender->cdev, &lender->node);
	put_device(&lender->node);
}

/**
 * dma_bounce_lend_end - stop lending from a pool that is about to be destroyed
 * @pool: the pool, whose domain no longer has devices
 */
void dma_bounce_lend_end(struct dma_bounce_pool *pool)
{
	struct dma_bounce_lender *lender;

	guard(rwsem_write)(&lend_sem);
	guard(mutex)(&lend_lock);
	list_for_each_entry(lender, &lenders, list)
		if (lender->pool == pool)
			lender->pool = NULL;
}

static int __init lend_init(void)
{
	int ret;

	ret = class_register(&lend_class);
	if (ret)
		return ret;
	ret = alloc_chrdev_region(&lend_major, 0, DMA_BOUNCE_LENDERS, "iommu_bounce");
	if (ret)
		class_unregister(&lend_class);
	return ret;
}
subsys_initcall(lend_init);
