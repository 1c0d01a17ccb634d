// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce memory lent to applications
 *
 * An application can avoid the copies of large transfers: it maps /dev/iommu_bounce/DEVICE, and
 * gets chunks of the memory that stays mapped for that device. Buffers in this memory already have
 * an address for the device. So direct I/O with them, also by io_uring, needs no request to the
 * IOMMU and no copy. The device reaches the lent memory, and no other memory of the application.
 *
 * A lent chunk has a place in the pool's range, but no slots. It is given back when the application
 * has unmapped it and nothing holds its pages. When the last device leaves a domain, applications
 * lose their mappings (SIGBUS). The kernel then waits until nothing holds the pages.
 *
 * Lent memory needs page structures. For windows, they are made when a file is first opened.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/cdev.h>
#include <linux/cleanup.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/rwsem.h>
#include <linux/slab.h>

#include "dma-bounce-lend.h"
#include "dma-bounce-pool.h"

DEFINE_STATIC_KEY_FALSE(dma_bounce_lend_key);

/* A pool lends at most its budget divided by DMA_BOUNCE_LEND_PART. */
#define DMA_BOUNCE_LEND_PART	2
/* Interval in jiffies between warnings that a device's removal waits for users of lent memory */
#define DMA_BOUNCE_LEND_SAY	(10 * HZ)

/**
 * struct dma_bounce_loan - memory that one call of mmap() lent to an application
 * @list:	entry in the pool's list
 * @file:	file that is mapped. The reference keeps its file system mounted.
 * @start:	offset of the loan in the file
 * @refs:	one reference for each mapping, and one while the loan is in the list
 * @mappings:	number of mappings. A mapping may be split.
 * @making:	the first mapping is being made
 * @nchunks:	number of chunks
 * @chunks:	the chunks
 */
struct dma_bounce_loan {
	struct list_head	list;
	struct file		*file;
	loff_t			start;
	refcount_t		refs;
	atomic_t		mappings;
	bool			making;
	unsigned int		nchunks;
	struct dma_bounce_lent	*chunks[] __counted_by(nchunks);
};

/**
 * struct dma_bounce_lent - a chunk that is lent
 * @pool:	pool of the chunk
 * @chunk:	the chunk
 * @phys:	physical address of its memory
 * @size:	length in bytes
 * @iova:	address for devices of the pool
 * @rcu:	frees this structure
 *
 * The first page of each folio of the chunk points to this structure. The provider may have made
 * one folio of the chunk's pages, or several.
 */
struct dma_bounce_lent {
	struct dma_bounce_pool	*pool;
	struct dma_bounce_chunk	*chunk;
	phys_addr_t		phys;
	size_t			size;
	dma_addr_t		iova;
	struct rcu_head		rcu;
};

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
 * Returns the number of bytes that a chunk can lend. The last page is not lent. Otherwise a buffer
 * could span two chunks that are adjacent in memory, but not in IOVA.
 */
static size_t lendable_bytes(struct dma_bounce_pool *pool)
{
	return (1UL << pool->slots.chunk_shift) - PAGE_SIZE;
}

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

/* Chunks. The caller of these functions holds the mutex of the pool. */

static struct page *lent_page(struct dma_bounce_lent *lent, unsigned long i)
{
	return pfn_to_page(PHYS_PFN(lent->phys) + i);
}

/* Returns the folio at page @i of a chunk, or NULL at the end. Moves @i after the folio. */
static struct folio *lent_folio(struct dma_bounce_lent *lent, unsigned long *i)
{
	struct folio *folio;

	if (*i >= lent->size >> PAGE_SHIFT)
		return NULL;
	folio = page_folio(lent_page(lent, *i));
	*i += folio_nr_pages(folio);
	return folio;
}

static void lent_mark(struct dma_bounce_lent *lent, void *data)
{
	struct folio *folio;
	unsigned long i = 0;

	while ((folio = lent_folio(lent, &i)))
		WRITE_ONCE(folio_page(folio, 0)->zone_device_data, data);
}

/**
 * dma_bounce_chunk_lend - add a chunk without slots that devices may read and write
 * @pool: the pool, whose mutex is held
 *
 * Return: the chunk, or an error pointer. dma_bounce_chunk_del() gives the chunk back.
 */
struct dma_bounce_chunk *dma_bounce_chunk_lend(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	dma_addr_t iova;
	size_t size;
	void *va;

	chunk = dma_bounce_chunk_make(pool, DMA_BOUNCE_RW, DMA_BOUNCE_CLASSES - 1, &va, &iova,
				      &size);
	if (!IS_ERR(chunk))
		dma_bounce_chunk_publish_whole(&pool->slots, chunk, va, iova, size);
	return chunk;
}

static struct dma_bounce_lent *lent_alloc(struct dma_bounce_pool *pool)
{
	struct dma_bounce_lent *lent;
	struct dma_bounce_chunk *chunk;

	lent = kzalloc(sizeof(*lent), GFP_KERNEL);
	if (!lent)
		return ERR_PTR(-ENOMEM);
	chunk = dma_bounce_chunk_lend(pool);
	if (IS_ERR(chunk)) {
		kfree(lent);
		return ERR_CAST(chunk);
	}
	lent->pool = pool;
	lent->chunk = chunk;
	lent->phys = pool->region.phys + (chunk->va - pool->region.va);
	lent->size = chunk->size;
	lent->iova = chunk->iova;
	lent_mark(lent, lent);
	pool->lent += lent->size;
	return lent;
}

static void lent_free(struct dma_bounce_lent *lent)
{
	struct dma_bounce_pool *pool = lent->pool;

	lent_mark(lent, NULL);
	pool->lent -= lent->size;
	dma_bounce_chunk_del(pool, lent->chunk);
	kfree_rcu(lent, rcu);
}

/* Returns true if a page of a loan without mappings is still in use. */
static bool loan_held(struct dma_bounce_loan *loan)
{
	struct folio *folio;
	unsigned long i;
	unsigned int n;

	for (n = 0; n < loan->nchunks; n++) {
		i = 0;
		while ((folio = lent_folio(loan->chunks[n], &i)))
			if (folio_ref_count(folio) != 1)
				return true;
	}
	return false;
}

static void loan_put(struct dma_bounce_loan *loan)
{
	if (!refcount_dec_and_test(&loan->refs))
		return;
	fput(loan->file);
	kfree(loan);
}

/* Gives the chunks of a loan back, even if the application still has mappings. */
static void loan_end(struct dma_bounce_loan *loan)
{
	while (loan->nchunks)
		lent_free(loan->chunks[--loan->nchunks]);
	list_del(&loan->list);
	loan_put(loan);
}

/* Makes a loan for one mapping. */
static struct dma_bounce_loan *loan_make(struct dma_bounce_pool *pool, struct file *file,
					 unsigned int nchunks)
{
	struct dma_bounce_loan *loan;
	struct dma_bounce_lent *lent;
	unsigned int n;

	if (pool->lent + ((u64)nchunks << pool->slots.chunk_shift) >
	    pool->budget / DMA_BOUNCE_LEND_PART)
		return ERR_PTR(-ENOMEM);
	loan = kzalloc(struct_size(loan, chunks, nchunks), GFP_KERNEL);
	if (!loan)
		return ERR_PTR(-ENOMEM);
	loan->file = get_file(file);
	refcount_set(&loan->refs, 1);
	list_add(&loan->list, &pool->loans);
	for (n = 0; n < nchunks; n++) {
		lent = lent_alloc(pool);
		if (IS_ERR(lent)) {
			loan_end(loan);
			return ERR_CAST(lent);
		}
		loan->nchunks = n + 1;
		loan->chunks[n] = lent;
	}
	/* The IOVA is unique among loans, so each loan has its own range of the file. */
	loan->start = loan->chunks[0]->iova;
	refcount_inc(&loan->refs);
	atomic_set(&loan->mappings, 1);
	loan->making = true;
	return loan;
}

/* Ends loans that are no longer used. */
static void loans_reap(struct dma_bounce_pool *pool)
{
	struct dma_bounce_loan *loan, *next;

	list_for_each_entry_safe(loan, next, &pool->loans, list)
		if (!atomic_read(&loan->mappings) && !READ_ONCE(loan->making) && !loan_held(loan))
			loan_end(loan);
}

/*
 * Ends all loans, because the last device is about to leave the domain. The pool is not active, so
 * it makes no new loans. The mutex is dropped while waiting for users of the pages, because these
 * users may need the mutex.
 */
static void loans_stop(struct dma_bounce_pool *pool)
{
	unsigned long say = jiffies + DMA_BOUNCE_LEND_SAY;
	struct dma_bounce_loan *loan;
	bool making;

	while ((loan = list_first_entry_or_null(&pool->loans, struct dma_bounce_loan, list))) {
		/* pairs with lend_mmap(), whose mapping becomes visible a little later */
		making = smp_load_acquire(&loan->making);
		unmap_mapping_range(loan->file->f_mapping, loan->start,
				    (loff_t)loan->nchunks << pool->slots.chunk_shift, 1);
		if (!making && !loan_held(loan)) {
			loan_end(loan);
			continue;
		}
		mutex_unlock(&pool->slots.mutex);
		msleep(20);
		mutex_lock(&pool->slots.mutex);
		if (time_after(jiffies, say)) {
			pr_warn("%s: waiting for users of lent memory\n", pool->name);
			say = jiffies + DMA_BOUNCE_LEND_SAY;
		}
	}
	/* Wait for dma_bounce_lent_map(), which may have found a loan's pages. */
	synchronize_rcu();
}

static const struct dma_bounce_loan_ops loan_ops = {
	.reap	= loans_reap,
	.stop	= loans_stop,
};

/* Mapping for devices */

/**
 * dma_bounce_lent_map - find the device's address of lent memory
 * @pool: the pool of the device's domain
 * @phys: address of the memory, for which dma_bounce_is_lent() is true
 * @size: length of the memory in bytes
 *
 * Return: the address, or DMA_MAPPING_ERROR if the memory is not lent, or is lent by the pool of
 * another domain.
 */
dma_addr_t dma_bounce_lent_map(struct dma_bounce_pool *pool, phys_addr_t phys, size_t size)
{
	dma_addr_t addr = DMA_MAPPING_ERROR;
	struct dma_bounce_lent *lent;

	rcu_read_lock();
	lent = READ_ONCE(folio_page(page_folio(pfn_to_page(PHYS_PFN(phys))), 0)->zone_device_data);
	if (lent && lent->pool == pool && size <= lent->size - (phys - lent->phys)) {
		addr = lent->iova + (phys - lent->phys);
		dma_bounce_count(pool, DMA_BOUNCE_LENT, 1);
	}
	rcu_read_unlock();
	return addr;
}

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

	/* Do not let an exiting process wait: the pool checks its loans from time to time. */
	if (atomic_dec_and_test(&loan->mappings) && mutex_trylock(&lend_lock)) {
		if (lender->pool)
			dma_bounce_pool_retry(lender->pool);
		mutex_unlock(&lend_lock);
	}
	loan_put(loan);
}

static const struct vm_operations_struct loan_vm_ops = {
	.open	= loan_open,
	.close	= loan_close,
};

static int loan_insert(struct vm_area_struct *vma, struct dma_bounce_loan *loan)
{
	unsigned long addr = vma->vm_start, left = vma_pages(vma), i;
	unsigned int n;
	int ret;

	for (n = 0; n < loan->nchunks; n++) {
		struct dma_bounce_lent *lent = loan->chunks[n];

		for (i = 0; left && i < (lent->size >> PAGE_SHIFT) - 1;
		     i++, left--, addr += PAGE_SIZE) {
			ret = vm_insert_page(vma, addr, lent_page(lent, i));
			if (ret)
				return ret;
		}
	}
	return left ? -ENOMEM : 0;
}

static int lend_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct dma_bounce_lender *lender = lender_of(file);
	u64 len = vma->vm_end - vma->vm_start;
	struct dma_bounce_pool *pool;
	struct dma_bounce_loan *loan;
	u64 nchunks;
	int ret;

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
		loans_reap(pool);
		nchunks = DIV_ROUND_UP_ULL(len, lendable_bytes(pool));
		if (nchunks > pool->budget >> pool->slots.chunk_shift)
			return -ENOMEM;
		loan = loan_make(pool, file, nchunks);
		if (IS_ERR(loan))
			return PTR_ERR(loan);
	}
	vma->vm_pgoff = loan->start >> PAGE_SHIFT;
	vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	ret = loan_insert(vma, loan);
	if (!ret) {
		vma->vm_private_data = loan;
		vma->vm_ops = &loan_vm_ops;
	} else {
		/* When this function fails, mmap() unmaps the pages. */
		atomic_set(&loan->mappings, 0);
	}
	smp_store_release(&loan->making, false); /* pairs with loans_stop() */
	if (ret) {
		loan_put(loan);
		dma_bounce_pool_retry(pool);
	}
	return ret;
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
	smp_store_release(&pool->loan_ops, &loan_ops);	/* pairs with lend_mmap() */
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
	list_add(&lender->list, &lenders);
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
	guard(mutex)(&lend_lock);
	if (pool && !pool->ops->lend)
		pool = NULL;
	lender = lender_find(dev);
	if (!lender && pool)
		lender = lender_make(dev);
	if (lender)
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
