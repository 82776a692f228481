BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0300');
CREATE TABLE certificates (
	fingerprint VARCHAR(64) NOT NULL,
	party VARCHAR(16) NOT NULL,
	name VARCHAR(64) NOT NULL,
	not_before FLOAT NOT NULL,
	not_after FLOAT NOT NULL,
	added_at FLOAT NOT NULL,
	revoked_at FLOAT,
	reason VARCHAR,
	roles JSON NOT NULL,
	PRIMARY KEY (fingerprint)
);
CREATE TABLE consortia (
	number INTEGER NOT NULL,
	offered_at FLOAT NOT NULL,
	document VARCHAR NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE interventions (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	action VARCHAR(16) NOT NULL,
	operator VARCHAR(64) NOT NULL,
	run VARCHAR(64),
	site VARCHAR(64),
	reason VARCHAR NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE rounds (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	size INTEGER NOT NULL,
	quorum INTEGER NOT NULL,
	enrolled INTEGER NOT NULL,
	opened_at FLOAT NOT NULL,
	closed_at FLOAT,
	state VARCHAR(64),
	aggregate VARCHAR(64),
	complete BOOLEAN,
	abandoned VARCHAR,
	scored BOOLEAN NOT NULL,
	aggregations INTEGER DEFAULT 0 NOT NULL,
	rolled_back BOOLEAN DEFAULT 0 NOT NULL,
	statistics JSON,
	PRIMARY KEY (run, round, attempt)
);
INSERT INTO "rounds" VALUES('kept',0,1,2,2,2,1.79592077750842213628e+09,1.79592077763544559479e+09,'0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',NULL,1,NULL,0,1,0,'{"prototype_min_distance": 1.111111088029502, "classes_covered": 0.0}');
INSERT INTO "rounds" VALUES('kept',1,1,2,2,2,1.79592077764927411081e+09,1.79592078058420300478e+09,'5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.0034583413384841723, "prototype_min_distance": 1.0452030511488914, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',2,1,2,2,2,1.79592078063392615325e+09,1.79592078317766427994e+09,'210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',NULL,1,NULL,1,1,0,'{"prototype_shift": 0.002583830738072035, "prototype_min_distance": 0.9972776564802002, "classes_covered": 9.0}');
INSERT INTO "rounds" VALUES('kept',3,1,2,2,2,1.7959207832100334167e+09,NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
CREATE TABLE runs (
	run VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	recipe VARCHAR NOT NULL,
	position INTEGER NOT NULL,
	began_at FLOAT NOT NULL,
	ended_at FLOAT,
	outcome VARCHAR(16),
	reason VARCHAR,
	paused BOOLEAN DEFAULT 0 NOT NULL,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('kept','ed3888d6cc743ae815f659f920e5c937bc48e6eea15e086476b293d3b548ce5f','{"name":"kept","seed":0,"rounds":5,"classes":10,"class_names":[],"input":{"shape":[1,8,8],"mean":[0.5],"std":[0.5],"fit":"exact","colours":"exact","window":null},"method":{"name":"fednh","scale":1.0},"model":{"name":"mlp","pretrained_body":null,"hidden":[16]},"plan":{"epochs":60,"batch_size":4,"drop_last":false,"loss":"cross-entropy","tau":1.0,"sampling":"shuffled","optimizer":"sgd","lr":0.01,"momentum":0.9,"weight_decay":0.0,"schedule":"constant","lr_decay":1.0,"lr_steps":[0.5,0.75],"warmup_rounds":0,"max_grad_norm":null,"augmentation":"none","amp":true,"buffers":"averaged","checkpoint":false,"dp":null},"federation":{"min_sites":2,"participation":1.0,"over_selection":1.0,"quorum":1.0,"deadline_s":600.0,"grace":0.5,"required_sites":[],"min_contributors":2,"stall_timeout_s":120.0,"max_attempts":5,"site_wait_timeout_s":604800.0,"max_update_norm":1000000000.0,"max_model_mb":512.0,"max_relative_norm":50.0,"outlier_factor":20.0,"robust":"none","max_bad_sites":1,"max_weight_ratio":4.0,"score_every":1,"score_personal_every":null,"best_by":null,"patience":null,"min_improvement":0.0,"score_deadline_s":600.0,"heartbeat_s":1.0,"secure":false,"sum_step_s":60.0,"sum_group":3},"evaluation":{"frequency_groups":false,"probabilities":false,"personal_test_images":null,"class_order":[]}}',1,1.79592077144995117187e+09,NULL,NULL,NULL,0);
CREATE TABLE score_sums (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	name VARCHAR(64) NOT NULL,
	mean FLOAT NOT NULL,
	sites INTEGER NOT NULL,
	PRIMARY KEY (run, round, attempt, name)
);
CREATE TABLE scores (
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	name VARCHAR(64) NOT NULL,
	value FLOAT NOT NULL,
	PRIMARY KEY (run, round, attempt, site, name)
);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_l',8.75786714699164914321e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.pm_v',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-2','personal.balanced_accuracy',0.65);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_l',8.98609899539643763866e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.accuracy',6.0192307692307689404e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.pm_v',6.62393162393162371337e-01);
INSERT INTO "scores" VALUES('kept',1,1,'site-1','personal.balanced_accuracy',6.01923076923076783018e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_l',9.45337995941509690034e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.accuracy',8.84615384615384581223e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.pm_v',8.84615384615384581223e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-2','personal.balanced_accuracy',8.84615384615384692246e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_l',9.74442089674994349479e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.accuracy',8.96153846153846189714e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.pm_v',9.44444444444444419772e-01);
INSERT INTO "scores" VALUES('kept',2,1,'site-1','personal.balanced_accuracy',8.96153846153846189714e-01);
CREATE TABLE sites (
	site VARCHAR(64) NOT NULL,
	roles JSON NOT NULL,
	excluded VARCHAR,
	PRIMARY KEY (site)
);
INSERT INTO "sites" VALUES('site-1','["trainer"]',NULL);
INSERT INTO "sites" VALUES('site-2','["trainer"]',NULL);
CREATE TABLE sum_groups (
	id INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	first VARCHAR(64) NOT NULL,
	formed_at FLOAT NOT NULL,
	dissolved_at FLOAT,
	PRIMARY KEY (id)
);
CREATE TABLE tasks (
	task_id VARCHAR(64) NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	base_digest VARCHAR(64),
	base_bytes INTEGER NOT NULL,
	task_status VARCHAR(16) NOT NULL,
	reason VARCHAR NOT NULL,
	subject VARCHAR(16),
	PRIMARY KEY (task_id)
);
INSERT INTO "tasks" VALUES('181f777ba6367b71af6248a1840f8ad5','kept',0,1,'site-1','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('4f26eb945a40337dbd36b35c0325f986','kept',0,1,'site-2','initialise',NULL,0,'reported','',NULL);
INSERT INTO "tasks" VALUES('002ac996b92c3dcdc0b368b6c16cec4a','kept',1,1,'site-1','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('8fcf46c8d5ac8e83da322bb21a44072f','kept',1,1,'site-2','fit','0fa5535f4aad5cf1a93035efd2667dd1ef0169212df661e23dd8e69298dbe198',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('46cb342f45ef7af015dd6a078d77066b','kept',1,1,'site-1','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('6c2496ed649327e8fcd132e1f8111264','kept',1,1,'site-2','score','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('185cd2d40ef03f89515c6961db8ad54b','kept',2,1,'site-1','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('2b3def1c132c9df57a32a03acdb13f5b','kept',2,1,'site-2','fit','5da774a43cd096e8cb76836468cdb89e7a0238e670238aeb5d81fefa91a0b582',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('4c076d86ce3c90454207e03413016ead','kept',2,1,'site-1','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('15f6e488a8a7b4bd6d6bacc5b1360ad3','kept',2,1,'site-2','score','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'reported','',NULL);
INSERT INTO "tasks" VALUES('f80cff91812d01c63a66279a31b3f824','kept',3,1,'site-1','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'started','',NULL);
INSERT INTO "tasks" VALUES('3546d262a8f84e3a1d7e2a317f7881a0','kept',3,1,'site-2','fit','210b720dec299bd01bfdbf42adde451209d4e6bf8cc332931737d7961aa1bb9e',5108,'started','',NULL);
CREATE TABLE updates (
	id INTEGER NOT NULL,
	run VARCHAR(64) NOT NULL,
	round INTEGER NOT NULL,
	attempt INTEGER NOT NULL,
	site VARCHAR(64) NOT NULL,
	task_id VARCHAR(64) NOT NULL,
	verdict VARCHAR(16) NOT NULL,
	code VARCHAR(24) DEFAULT '' NOT NULL,
	reason VARCHAR NOT NULL,
	digest VARCHAR(64) NOT NULL,
	bytes INTEGER NOT NULL,
	metrics JSON NOT NULL,
	weight FLOAT,
	norm FLOAT,
	set_aside VARCHAR,
	record_hash VARCHAR(64) NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
INSERT INTO "updates" VALUES(1,'kept',0,1,'site-2','4f26eb945a40337dbd36b35c0325f986','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'a9a06c64bdb7a193b64eded23eb036e0c050d6107c6c3de07eea04ff757a0c80',1.79592077761266875261e+09);
INSERT INTO "updates" VALUES(2,'kept',0,1,'site-1','181f777ba6367b71af6248a1840f8ad5','accepted','','','90fb25ec9cc17a6e8756084f2729d82adf55fb6769fbb984e1664e35832899f2',5144,'{}',NULL,3.06656087183091274894e+00,NULL,'79a9748dd6d16d49c4e676898407d7e179e7dc651d401ce91099feb944bb581a',1.79592077761808514594e+09);
INSERT INTO "updates" VALUES(3,'kept',1,1,'site-2','8fcf46c8d5ac8e83da322bb21a44072f','accepted','','','9271cbaab4612da5b33b5777e468b93527baccd3dbd39445f01540e433d8a017',5740,'{"loss": 0.41883310645517674}',NULL,1.72754466835384086205e+01,NULL,'4d09fff2bf65862823d253cf9d236084ab2e09300e8f3c08f0dc7dbf01524af8',1.79592078048925924303e+09);
INSERT INTO "updates" VALUES(4,'kept',1,1,'site-1','002ac996b92c3dcdc0b368b6c16cec4a','accepted','','','7b80ee83d62520d3a73dbcc94a5b8a6683066506417fb7563f960576b5882c90',5612,'{"loss": 0.27874232889316586}',NULL,1.68067501865409774097e+01,NULL,'ccdd52003190a39cbac585463ac674f5355169c302a34c90e7f68976fade0a7c',1.79592078057422494885e+09);
INSERT INTO "updates" VALUES(5,'kept',2,1,'site-1','185cd2d40ef03f89515c6961db8ad54b','accepted','','','ef80b18c37b7b5d34a7dc1cb341196a2aecae39f2b8daca192473440507c7f99',5612,'{"loss": 0.059827827441247976}',NULL,1.15662750016579121139e+01,NULL,'561d475bff1deac3ccfcd4ce0dfd4a3d9efbdc80ade1f1d6dda0e7411509b1b3',1.79592078280774044988e+09);
INSERT INTO "updates" VALUES(6,'kept',2,1,'site-2','2b3def1c132c9df57a32a03acdb13f5b','accepted','','','e58c50aba52caabc7ab78d4ac438969b83f91c720fd5ac8f41b3548829fa34b9',5740,'{"loss": 0.021818776756826072}',NULL,6.14246342280202117791e+00,NULL,'d39260c0cfcae77ebcd36c9989617ab304692659d34c250d56cc28b5edf16f1e',1.79592078316992306711e+09);
CREATE INDEX tasks_of_round ON tasks (run, round);
CREATE UNIQUE INDEX one_update_a_task ON updates (task_id) WHERE verdict = 'accepted';
CREATE INDEX updates_of_round ON updates (run, round);
CREATE UNIQUE INDEX one_group_a_site ON sum_groups (site) WHERE dissolved_at IS NULL;
COMMIT;
